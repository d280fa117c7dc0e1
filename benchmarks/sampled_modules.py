"""What ``sampled_mutants.py`` knows of modules: tests beside those of their name, and equivalent mutants."""

_FORMATS = ("models/test_number_formats", "models/test_stored_scale", "models/test_stored_format")
_ROLLOUT = ("rollout/test_sglang_rollout", "rollout/test_surplus")
_SHAPES = ("models/test_shapes", "models/test_defaults", "models/test_flops")
SAMPLED: dict[str, tuple[str, ...]] = {
    "slime/weight_sync/agreement.py": ("weight_sync/test_group_address", "weight_sync/test_agreement"),
    "slime/weight_sync/update.py": ("weight_sync/test_several_transports", "weight_sync/test_disk"),
    "slime/weight_sync/report.py": ("weight_sync/test_disk",),
    "slime/weight_sync/transports/broadcast.py": ("weight_sync/test_broadcast",),
    "slime/utils/tensor_bucket.py": ("weight_sync/test_handle",),
    "slime/weight_sync/transports/session.py": ("weight_sync/test_session", "weight_sync/test_disk"),
    "slime/weight_sync/transports/handle.py": ("weight_sync/test_handle", "processes/test_reaper"),
    "slime/models/checkpoint/int4.py": _FORMATS,
    "slime/models/checkpoint/fp8.py": _FORMATS,
    "slime/models/checkpoint/mxfp4.py": ("models/test_stored_scale", "models/test_mxfp4"),
    "slime/models/checkpoint/encoding.py": ("models/test_stored_format", "models/test_mxfp4"),
    "slime/models/checkpoint/stored_forms.py": ("arguments/test_weight_samples",),
    "slime/models/checkpoint/tensor_shapes.py": ("arguments/test_weight_samples",),
    "slime/models/checkpoint/encoded_weights.py": (
        "models/test_weights_dir",
        "models/test_mxfp4",
        "tools/test_quantize",
    ),
    "slime/models/checkpoint/tensor_slices.py": ("models/test_safetensors_file", "models/test_weights_dir"),
    "slime/models/hf_config.py": ("models/test_nested_family", "models/test_families"),
    "slime/models/families/glm_moe_dsa.py": (*_SHAPES, "models/test_families"),
    "slime/models/rules.py": ("models/test_weights_dir", "backends/megatron_utils/test_hf_weights"),
    "slime/models/linear_attention.py": ("models/test_shapes", "models/test_flops"),
    "slime/models/experts.py": _SHAPES,
    "slime/models/decoder.py": _SHAPES,
    **{
        f"slime/models/families/{name}.py": _SHAPES
        for name in (
            *("deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("gemma3_text", "minimax_m2"),
        )
    },
    "slime/rollout/attempts.py": _ROLLOUT,
    "slime/rollout/generation.py": ("rollout/test_original_calls", *_ROLLOUT),
    "slime/rollout/sglang_rollout.py": _ROLLOUT,
    "slime/rollout/rm_hub/f1.py": ("rollout/test_rm_hub",),
    "slime/rollout/rm_hub/__init__.py": ("rollout/test_rm_hub",),
    "slime/rollout/rm_hub/grading_pool.py": ("rollout/test_grading_processes",),
    "slime/rollout/rm_hub/math_grader.py": ("rollout/test_rm_hub", "rollout/test_grading_processes"),
    "slime/backends/embedded_engine/sampler.py": (
        "backends/embedded_engine/test_sampler",
        "backends/embedded_engine/test_penalties",
        "backends/embedded_engine/grammar/test_grammars",
    ),
    "slime/backends/embedded_engine/kv_cache.py": (
        "backends/embedded_engine/test_experts",
        "backends/embedded_engine/test_scheduler",
    ),
    "slime/backends/embedded_engine/checkpoint.py": ("backends/embedded_engine/test_checkpoint",),
    "slime/backends/embedded_engine/http/state.py": ("backends/embedded_engine/test_scheduler",),
    "slime/backends/fsdp_utils/lr_scheduler.py": (
        "backends/fsdp_utils/test_lr_scheduler",
        "backends/megatron_utils/test_optimizer",
    ),
}
EQUIVALENT: dict[str, str] = {
    "slime/backends/embedded_engine/sampler.py: -1  =>  +1": "the last of two dimensions, in _invert's sum",
}
"""By `sampled_mutants.label` of a mutant that no test can kill: why."""
