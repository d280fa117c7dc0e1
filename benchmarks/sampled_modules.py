"""What ``sampled_mutants.py`` knows of modules: tests beside those of their name, and equivalent mutants."""

_FORMATS = ("models/test_number_formats", "models/test_stored_scale", "models/test_stored_format")
_ROLLOUT = ("rollout/test_requests", "rollout/test_sglang_rollout", "rollout/test_surplus")
_ENGINE = "backends/embedded_engine"
_FSDP, _MEGATRON = "backends/fsdp_utils", "backends/megatron_utils"
_SHAPES = (
    *("models/test_shapes", "models/test_families", "models/test_qwen3_moe", "models/test_flops"),
    "models/test_defaults",
)
SAMPLED: dict[str, tuple[str, ...]] = {
    "slime/weight_sync/agreement.py": ("weight_sync/test_group_address", "weight_sync/test_agreement"),
    "slime/weight_sync/filters/format.py": ("weight_sync/test_quantized",),
    "slime/weight_sync/split.py": ("weight_sync/test_shared_delta",),
    "slime/weight_sync/versions/share.py": (
        "weight_sync/test_shared_delta",
        "weight_sync/test_delta_buckets",
    ),
    "slime/weight_sync/versions/puller.py": ("weight_sync/test_puller",),
    "slime/weight_sync/versions/codec.py": ("weight_sync/test_versions", "weight_sync/test_pulled_versions"),
    "slime/weight_sync/versions/local.py": ("weight_sync/test_versions", "weight_sync/test_pulled_versions"),
    "slime/weight_sync/versions/folder.py": ("weight_sync/test_pulled_versions", "weight_sync/test_disk"),
    "slime/weight_sync/versions/remote.py": ("weight_sync/test_delta_remote",),
    "slime/weight_sync/versions/source.py": ("weight_sync/test_remote", "weight_sync/test_versions"),
    "slime/weight_sync/versions/storage.py": ("weight_sync/test_remote",),
    "slime/utils/stores.py": ("weight_sync/test_remote", "arguments/test_weight_sync"),
    "slime/weight_sync/versions/manifest.py": (
        "weight_sync/test_versions",
        "weight_sync/test_pulled_versions",
    ),
    "slime/weight_sync/versions/staged.py": (
        "weight_sync/test_versions",
        "weight_sync/test_pulled_versions",
        "weight_sync/test_disk",
    ),
    "slime/weight_sync/update.py": ("weight_sync/test_several_transports", "weight_sync/test_disk"),
    "slime/weight_sync/report.py": ("weight_sync/test_disk",),
    "slime/weight_sync/transports/broadcast.py": ("weight_sync/test_broadcast",),
    "slime/utils/tensor_bucket.py": ("weight_sync/test_handle",),
    "slime/weight_sync/transports/followed.py": ("weight_sync/test_followed", "weight_sync/test_followers"),
    "slime/weight_sync/transports/followers.py": ("weight_sync/test_followers",),
    "slime/weight_sync/follower.py": ("weight_sync/test_followed", "weight_sync/test_followers"),
    "slime/weight_sync/presence.py": ("weight_sync/test_presence",),
    "slime/weight_sync/versions/board.py": ("weight_sync/test_followed",),
    "slime/weight_sync/versions/pulse.py": ("weight_sync/test_presence",),
    "slime/weight_sync/versions/home.py": ("weight_sync/test_presence", "cli/test_weights"),
    "slime/weight_sync/transports/session.py": ("weight_sync/test_session", "weight_sync/test_disk"),
    "slime/weight_sync/transports/handle.py": ("weight_sync/test_handle", "processes/test_reaper"),
    "slime/models/checkpoint/int4.py": _FORMATS,
    "slime/models/checkpoint/fp8.py": _FORMATS,
    "slime/models/checkpoint/mxfp4.py": ("models/test_stored_scale", "models/test_mxfp4"),
    "slime/models/checkpoint/mxfp8.py": ("models/test_stored_scale", "models/test_mxfp8"),
    "slime/models/checkpoint/stored_scale.py": _FORMATS,
    "slime/models/checkpoint/encoding.py": (
        "models/test_stored_format",
        "models/test_mxfp4",
        "models/test_mxfp8",
    ),
    "slime/models/checkpoint/stored_forms.py": ("arguments/test_weight_samples",),
    "slime/models/checkpoint/tensor_shapes.py": ("arguments/test_weight_samples",),
    "slime/models/checkpoint/encoded_weights.py": (
        "models/test_weights_dir",
        "models/test_mxfp4",
        "models/test_mxfp8",
        "tools/test_quantize",
    ),
    "slime/models/checkpoint/tensor_slices.py": ("models/test_safetensors_file", "models/test_weights_dir"),
    "slime/models/hf_config.py": ("models/test_nested_family", "models/test_families"),
    "slime/models/families/glm_moe_dsa.py": _SHAPES,
    "slime/models/mtp.py": ("models/test_mtp", "arguments/test_mtp"),
    "slime/models/checkpoint/tensor_views.py": ("models/test_tensor_views",),
    "slime/models/rules.py": (
        "models/test_rules",
        "models/test_weights_dir",
        "backends/megatron_utils/test_hf_weights",
    ),
    "slime/models/linear_attention.py": (
        "models/test_linear_attention",
        *_SHAPES,
        "models/test_stored_format",
    ),
    "slime/models/flops.py": _SHAPES,
    "slime/models/shape.py": _SHAPES,
    "slime/models/__init__.py": (*_SHAPES, "models/test_nested_family"),
    "slime/models/experts.py": _SHAPES,
    "slime/models/decoder.py": _SHAPES,
    **{
        f"slime/models/families/{name}.py": _SHAPES
        for name in (
            *("deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("gemma3_text", "minimax_m2"),
        )
    },
    **{
        f"slime/models/families/{name}.py": (
            "models/test_families",
            *_SHAPES,
            "arguments/test_weight_samples",
        )
        for name in (
            *("glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "mimo", "mixtral"),
            *("qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next"),
        )
    },
    "slime/models/family.py": (
        "models/test_nested_family",
        "models/test_mxfp4",
        "arguments/test_sglang_models",
    ),
    "slime/models/checkpoint/expert_forms.py": ("models/test_weights_dir", "models/test_stored_format"),
    "slime/models/checkpoint/inspection.py": (
        "models/test_inspection",
        "arguments/test_weight_samples",
        "arguments/test_checkpoint_files",
    ),
    "slime/models/checkpoint/quantization.py": (
        "models/test_weights_dir",
        "models/test_mxfp4",
        "models/test_mxfp8",
        "models/test_stored_format",
    ),
    "slime/rollout/attempts.py": _ROLLOUT,
    "slime/rollout/generation.py": ("rollout/test_original_calls", *_ROLLOUT),
    "slime/rollout/sglang_rollout.py": _ROLLOUT,
    "slime/rollout/rm_hub/f1.py": ("rollout/test_rm_hub",),
    "slime/rollout/rm_hub/deepscaler.py": ("rollout/test_math_utils",),
    "slime/rollout/rm_hub/__init__.py": ("rollout/test_rm_hub",),
    "slime/rollout/rm_hub/grading_pool.py": ("rollout/test_grading_processes",),
    "slime/rollout/rm_hub/grading_worker.py": (
        "rollout/test_grading_confinement",
        "rollout/test_grading_processes",
    ),
    "slime/rollout/rm_hub/math_grader.py": (
        "rollout/test_requests",
        "rollout/test_rm_hub",
        "rollout/test_grading_processes",
    ),
    "slime/rollout/text_generation.py": (
        "rollout/test_requests",
        "router/test_middleware",
        "router/test_with_engines",
    ),
    "slime/backends/embedded_engine/sampler.py": (
        "backends/embedded_engine/test_sampler",
        "backends/embedded_engine/test_penalties",
        "backends/embedded_engine/grammar/test_grammars",
    ),
    **{
        f"slime/backends/embedded_engine/http/{name}.py": (
            f"{_ENGINE}/test_responses",
            f"{_ENGINE}/tool_calls/test_chats",
            f"{_ENGINE}/test_openai",
        )
        for name in (
            *("answers", "chat_messages", "chat_tools", "dialects", "parsing_routes", "streaming"),
            *("openai_bodies", "openai_objects", "openai_routes"),
        )
    },
    **{
        f"slime/backends/embedded_engine/{name}.py": (
            f"{_ENGINE}/tool_calls/test_json_formats",
            f"{_ENGINE}/tool_calls/test_reasoning",
            f"{_ENGINE}/tool_calls/test_formats",
            f"{_ENGINE}/tool_calls/test_chats",
        )
        for name in (
            *(
                "reasoning",
                "tool_calls/base",
                "tool_calls/forced",
                "tool_calls/formats",
                "tool_calls/json_formats",
            ),
            *("tool_calls/literals", "tool_calls/pythonic", "tool_calls/stream", "tool_calls/tagged_formats"),
        )
    },
    **{
        f"slime/backends/embedded_engine/{name}.py": (
            f"{_ENGINE}/test_responses",
            f"{_ENGINE}/test_generate",
            f"{_ENGINE}/test_streaming",
        )
        for name in ("http/generate_routes", "http/responses", "http/running", "stopping")
    },
    "slime/backends/embedded_engine/http/app.py": (
        f"{_ENGINE}/test_hostile",
        f"{_ENGINE}/test_generate",
        f"{_ENGINE}/test_server",
        "utils/test_request_gate",
    ),
    "slime/backends/embedded_engine/http/bodies.py": (
        f"{_ENGINE}/test_bodies",
        f"{_ENGINE}/test_hostile",
        f"{_ENGINE}/test_generate",
    ),
    "slime/backends/embedded_engine/build.py": (f"{_ENGINE}/test_build", f"{_ENGINE}/test_server"),
    "slime/backends/embedded_engine/sequence.py": (
        f"{_ENGINE}/test_admission",
        f"{_ENGINE}/test_streaming",
        f"{_ENGINE}/test_generate",
        f"{_ENGINE}/test_scheduler",
    ),
    "slime/backends/embedded_engine/prompt_logprobs.py": (
        f"{_ENGINE}/test_device",
        f"{_ENGINE}/test_generate",
    ),
    **{
        f"slime/backends/embedded_engine/{name}.py": (
            f"{_ENGINE}/test_weight_updates",
            f"{_ENGINE}/test_server",
        )
        for name in ("http/weight_routes", "weight_checker")
    },
    "slime/backends/embedded_engine/weight_updater.py": (
        f"{_ENGINE}/test_updater",
        f"{_ENGINE}/test_weight_updates",
    ),
    "slime/backends/embedded_engine/weight_groups.py": (
        f"{_ENGINE}/test_weight_groups",
        f"{_ENGINE}/test_weight_updates",
    ),
    **{
        f"slime/backends/embedded_engine/{name}.py": (f"{_ENGINE}/test_control", f"{_ENGINE}/test_scheduler")
        for name in ("engine", "http/control_routes", "http/info_routes")
    },
    **{
        f"slime/backends/embedded_engine/grammar/{name}.py": (f"{_ENGINE}/grammar/test_grammars",)
        for name in ("compiler", "constraint", "wanted", "worker")
    },
    **{
        f"slime/backends/embedded_engine/{name}.py": (
            f"{_ENGINE}/test_experts",
            f"{_ENGINE}/test_device",
            f"{_ENGINE}/test_generate",
        )
        for name in (
            "executor",
            "model",
            "mlp",
            "linear",
            "spans",
            "parameters",
            "named_weights",
            "model_config",
        )
    },
    **{
        f"slime/backends/embedded_engine/row_{name}.py": (f"{_ENGINE}/test_transformers",)
        for name in ("attention", "executor", "experts", "states")
    },
    "slime/backends/embedded_engine/http/prompts.py": (
        f"{_ENGINE}/test_prompts",
        f"{_ENGINE}/test_generate",
        "backends/sglang_utils/test_conformance_edges",
    ),
    "slime/backends/embedded_engine/memory_occupation.py": (
        f"{_ENGINE}/test_updater",
        f"{_ENGINE}/test_control",
        f"{_ENGINE}/test_server",
    ),
    "slime/backends/embedded_engine/__main__.py": (f"{_ENGINE}/test_server",),
    "slime/backends/embedded_engine/kv_cache.py": (
        "backends/embedded_engine/test_kv_cache",
        "backends/embedded_engine/test_experts",
        "backends/embedded_engine/test_scheduler",
    ),
    "slime/backends/embedded_engine/checkpoint.py": ("backends/embedded_engine/test_checkpoint",),
    "slime/backends/embedded_engine/http/state.py": (f"{_ENGINE}/test_state", f"{_ENGINE}/test_scheduler"),
    "slime/backends/fsdp_utils/step.py": (f"{_FSDP}/test_float16", f"{_FSDP}/test_any_model"),
    "slime/backends/fsdp_utils/optimizer.py": (f"{_FSDP}/test_optimizer", f"{_FSDP}/test_float16"),
    "slime/backends/fsdp_utils/loss_scale.py": (f"{_FSDP}/test_float16",),
    "slime/backends/fsdp_utils/attention.py": (f"{_FSDP}/test_forward", f"{_FSDP}/test_ways"),
    "slime/backends/fsdp_utils/probe.py": (f"{_FSDP}/test_ways",),
    "slime/backends/fsdp_utils/forward.py": (
        f"{_FSDP}/test_forward",
        f"{_FSDP}/test_ways",
        f"{_FSDP}/test_critic",
    ),
    "slime/backends/fsdp_utils/initialize.py": (f"{_FSDP}/test_loading", f"{_FSDP}/test_worker"),
    "slime/backends/fsdp_utils/model.py": (f"{_FSDP}/test_hf_weights", f"{_FSDP}/test_any_model"),
    "slime/backends/fsdp_utils/value_head.py": (f"{_FSDP}/test_critic",),
    "slime/backends/fsdp_utils/lora.py": (f"{_FSDP}/test_lora_targets", f"{_FSDP}/test_lora"),
    "slime/adapters/linears.py": (f"{_FSDP}/test_lora_targets",),
    "slime/adapters/record.py": (f"{_FSDP}/test_checkpoint", f"{_MEGATRON}/test_checkpoint"),
    **{
        f"slime/backends/megatron_utils/{name}.py": (
            f"{_MEGATRON}/test_model_layers",
            f"{_MEGATRON}/test_model_logits",
        )
        for name in (
            *("layers", "layer_spec", "latent_attention"),
            "model_provider",
        )
    },
    "slime/backends/megatron_utils/model_config.py": (
        f"{_MEGATRON}/test_model_config",
        f"{_MEGATRON}/test_model_logits",
    ),
    "slime/backends/megatron_utils/fused_adam.py": (
        f"{_MEGATRON}/test_own_optimizers",
        f"{_MEGATRON}/test_fused_adam",
        f"{_MEGATRON}/test_update_rules",
    ),
    "slime/backends/embedded_engine/sampling_params.py": (
        f"{_ENGINE}/test_sampling_params",
        f"{_ENGINE}/test_bodies",
        f"{_ENGINE}/test_admission",
        f"{_ENGINE}/test_penalties",
    ),
    **{
        f"slime/backends/megatron_utils/server/{name}.py": (
            f"{_MEGATRON}/test_server_launch",
            f"{_MEGATRON}/test_server",
        )
        for name in ("app", "arguments", "launch", "model")
    },
    **{
        f"slime/backends/sglang_utils/{name}.py": (
            "backends/sglang_utils/test_router_requests",
            "backends/sglang_utils/test_router",
        )
        for name in ("router", "router_commands")
    },
    **{
        f"slime/backends/megatron_utils/{name}.py": (f"{_MEGATRON}/test_mtp",)
        for name in ("mtp_step", "mtp_checkpoint")
    },
    "slime/backends/megatron_utils/cpu_support.py": (f"{_MEGATRON}/test_model_cpu_support",),
    "slime/backends/megatron_utils/import_hook.py": (
        f"{_MEGATRON}/test_import_hook",
        f"{_MEGATRON}/test_model_cpu_support",
    ),
    "slime/backends/megatron_utils/moe.py": (f"{_MEGATRON}/test_moe_model", f"{_MEGATRON}/test_moe_step"),
    "slime/backends/megatron_utils/step.py": (f"{_MEGATRON}/test_train_step_parity",),
    "slime/backends/megatron_utils/value_head.py": (f"{_MEGATRON}/test_critic",),
    "slime/backends/megatron_utils/moment_storage.py": (
        f"{_MEGATRON}/test_fused_adam",
        f"{_MEGATRON}/test_optimizer_kinds",
    ),
    "slime/backends/megatron_utils/named_params.py": (
        f"{_MEGATRON}/test_hf_weights",
        f"{_MEGATRON}/test_freezing",
    ),
    "slime/backends/megatron_utils/convert.py": ("tools/test_convert",),
    "slime/backends/megatron_utils/lora.py": (
        f"{_MEGATRON}/test_lora_targets",
        f"{_MEGATRON}/test_lora_dropout",
        f"{_MEGATRON}/test_lora",
    ),
    "slime/backends/megatron_utils/lora_checkpoint.py": (
        f"{_MEGATRON}/test_lora",
        f"{_MEGATRON}/test_checkpoint",
    ),
    "slime/backends/megatron_utils/stateless_adam.py": (
        f"{_MEGATRON}/test_own_optimizers",
        f"{_MEGATRON}/test_update_rules",
        f"{_MEGATRON}/test_optimizer_kinds",
        "plugin_contracts/test_original_behaviour",
    ),
    "slime/backends/megatron_utils/model_on_paper.py": ("check/test_memory",),
    "slime/backends/megatron_utils/initialize.py": (
        f"{_MEGATRON}/test_freezing",
        f"{_MEGATRON}/test_context_parallel",
    ),
    "slime/backends/megatron_utils/worker.py": (
        f"{_MEGATRON}/test_offload",
        f"{_MEGATRON}/test_skipped_steps",
        f"{_MEGATRON}/test_freezing",
    ),
    "slime/backends/fsdp_utils/lr_scheduler.py": (
        "backends/fsdp_utils/test_lr_scheduler",
        "backends/megatron_utils/test_optimizer",
    ),
}
SAMPLED_FOLDERS: dict[str, tuple[str, ...]] = {
    "slime/backends/embedded_engine/": tuple(
        f"backends/sglang_utils/test_conformance{part}" for part in ("", "_nuclei", "_openai")
    ),
}
"""Tests of all modules of a folder beside their own, which its server's process alone imports."""
EQUIVALENT: dict[str, str] = {
    "slime/backends/embedded_engine/sampler.py: -1  =>  +1 (5)": "the last of two dimensions",
    "slime/backends/embedded_engine/tool_calls/pythonic.py: 1  =>  2": "-2 and not -1: both are no position",
    "slime/models/checkpoint/encoding.py: 32  =>  33": "33 MiB at once and not 32, as is not drawn any more",
    "slime/models/checkpoint/mxfp4.py: scales > _BIAS + 125  =>  scales >= _BIAS + 125": (
        "products with one scale more are looked at, and 6 x 2^125 is finite"
    ),
    "slime/weight_sync/transports/broadcast.py: 1  =>  2 (3)": "a pool with a thread more than it has tasks",
    "slime/weight_sync/transports/__init__.py: TYPE_CHECKING  =>  not TYPE_CHECKING": "types alone",
    "slime/rollout/rm_hub/gpqa.py: True  =>  False": "frozen, as is not drawn any more",
    "slime/weight_sync/versions/manifest.py: 1  =>  2 (2)": "the blanks before a line of JSON",
    "slime/rollout/rm_hub/grading_pool.py: True  =>  False (4)": "whether a whole line came in time, unasked",
}
"""By the label of a mutant that no test can kill: why."""
