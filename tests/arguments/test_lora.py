"""Flags of low-rank adapters: names that users of other programs know, and what is not done with them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slime.adapters.named import first_adapters
from slime.arguments import validated_args
from slime.config.lora import LoraConfig
from slime.config.run import filled
from tests.arguments.conftest import write_empty_weights
from tests.arguments.sglang_options import as_installed
from tests.families import save_tiny_config
from tools.make_tiny_model import make_tokenizer


def test_they_have_the_names_that_other_programs_have(words):
    line = [*words(), "--lora-r", "8", "--lora-alpha", "16", "--target-modules", "q_proj", "self_attn.v_proj"]
    config = filled(
        LoraConfig, validated_args([*line, "--exclude-modules", r".*layers\.0\..*", "--use-rslora"])
    )
    assert config.adapts and config.lora_scale == pytest.approx(16 / 8**0.5)
    assert config.lora_target_modules == ["q_proj", "self_attn.v_proj"]
    assert not filled(LoraConfig, validated_args(words())).adapts


def test_without_a_rank_they_have_no_effect(words, notes):
    (note,) = [note for note in notes(words(lora_alpha=8)) if "lora" in note]
    assert note.startswith("--lora-alpha 8.0: has no effect without --lora-rank")
    assert not [note for note in notes(words(lora_alpha=8, lora_rank=4)) if "lora" in note]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_params_name_list": ["mlp"]}, "--freeze-params-name-list: not with --lora-rank 8"),
        (
            {"lora_target_modules": ["q_porj"]},
            "--lora-target-modules q_porj: no module of qwen3 (wanted: all-linear",
        ),
        ({"lora_exclude_modules": ["(a"]}, "--lora-exclude-modules (a: no regular expression: "),
        (
            {"train_backend": "fsdp", "lora_target_modules": ["q_porj"]},
            "--lora-target-modules q_porj: no module of qwen3 (wanted: all-linear",
        ),
    ],
)
def test_what_does_not_go_with_them_is_named(words, refusal, changes, message):
    assert refusal(words(lora_rank=8, **changes)).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pause_generation_mode": "in_place"}, "--pause-generation-mode in_place: not with --no-lora-merge"),
        (
            {"update_weight_transport": "disk", "update_weight_disk_dir": "versions"},
            "--update-weight-transport disk: not with --no-lora-merge (wanted: nccl)",
        ),
        (
            {
                **{"prefill_num_servers": 1, "rollout_num_gpus": 2, "colocate": None},
                "rollout_engine": "sglang",
            },
            "--prefill-num-servers 1: not with --no-lora-merge, which serves one",
        ),
        (
            {"rollout_engine": "sglang", "lora_target_modules": ["k_proj", "v_proj"]},
            "--lora-target-modules k_proj v_proj: model.layers.0.self_attn has no adapter for q_proj, and",
        ),
    ],
)
def test_what_no_engine_does_with_an_adapter_beside_the_base_is_named(words, refusals, changes, message):
    said = refusals(words(lora_rank=8, no_lora_merge=True, **changes))
    assert [line for line in said if line.startswith(message)], said


def test_no_engine_has_adapters_of_experts(words, refusals, tmp_path):
    path = save_tiny_config("qwen2_moe", tmp_path / "moe", vocab_size=512)
    make_tokenizer().save_pretrained(path)
    write_empty_weights(path)
    flags = {"hf_checkpoint": path, "lora_rank": 8, "lora_target_modules": ["q_proj", ".*experts.*"]}
    (line,) = [line for line in refusals(words(**flags, no_lora_merge=True)) if "lora" in line]
    assert line.startswith("--no-lora-merge: not with model.layers.") and "adapters of experts" in line
    beside = {"lora_exclude_modules": [r".*mlp\.experts.*"]}
    assert filled(LoraConfig, validated_args(words(**flags, **beside, no_lora_merge=True))).serves_adapter


def test_of_an_architecture_without_a_family_it_is_not_known_what_sglang_passes_over(
    words, refusals, tmp_path
):
    from transformers import Olmo2Config  # takes seconds, which the others need not wait for

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 512}
    Olmo2Config(**sizes, num_attention_heads=4, pad_token_id=None).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    flags = {"train_backend": "fsdp", "hf_checkpoint": tmp_path, "lora_rank": 8}
    assert filled(LoraConfig, validated_args(words(**flags, debug_train_only=True))).adapts
    said = refusals(words(**flags, rollout_engine="sglang", no_lora_merge=True))
    message = "--no-lora-merge: not with model_type olmo2, of whose layers SGLang may pass over"
    assert [line for line in said if line.startswith(message)], said


def test_engines_are_merged_into_unless_told_otherwise(words):
    served = lambda **changes: filled(LoraConfig, validated_args(words(**changes))).serves_adapter
    assert served(lora_rank=8, no_lora_merge=True)
    assert not served(lora_rank=8) and not served(no_lora_merge=True)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("glm4_moe", "--moe-router-bias-update-rate 0.001: moves the base"),
        ("qwen3_next", "--lora-rank 8: not with the gated delta nets of qwen3_next"),
    ],
)
def test_layers_without_adapters_are_named(words, refusal, tmp_path, family, message):
    path = save_tiny_config(family, tmp_path / family, vocab_size=512)
    make_tokenizer().save_pretrained(path)
    write_empty_weights(path)
    assert refusal(words(hf_checkpoint=path, lora_rank=8)).startswith(message)


def test_the_base_is_no_checkpoint_to_go_on_from(words, refusal, checkpoint):
    assert "is a model, not with --lora-rank 8" in refusal(words(lora_rank=8, load=checkpoint))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"r": 4}, "adapter_config.json says r 4 (wanted: 8, as --lora-rank has it)"),
        ({"use_rslora": True}, "adapter_config.json says use_rslora True (wanted: False, as"),
        ({"use_dora": True}, "adapter_config.json says use_dora True, which is not computed here"),
        ({"modules_to_save": ["lm_head"]}, "adapter_config.json says modules_to_save ['lm_head'], which"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_before_a_start(words, refusal, tmp_path, found, message):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "bias": "none", "modules_to_save": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | found))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    line = words(lora_rank=8, lora_adapter_path=tmp_path)
    assert refusal(line).startswith(f"--lora-adapter-path {tmp_path}: {message}")


def test_an_adapter_that_is_not_there_is_refused(words, refusal, tmp_path):
    message = refusal(words(lora_rank=8, lora_adapter_path=tmp_path / "none"))
    assert message.startswith(f"--lora-adapter-path {tmp_path / 'none'}: adapter_config.json cannot be read")


def test_of_several_adapters_each_may_have_a_directory_to_start_from(words, refusal, two_sources, tmp_path):
    line = words(**SEVERAL, lora_adapter_path=tmp_path / "both", prompt_data=two_sources)
    for name, rank in (("a", 8), ("b", 4)):
        path = tmp_path / "both" / name
        assert f"--lora-adapter-path {path}: adapter_config.json cannot be read" in refusal(line)
        path.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        (path / "adapter_model.safetensors").write_bytes(b"")
    message = f"--lora-adapter-path {path}: adapter_config.json says r 4 (wanted: 8, as --lora-rank has it)"
    assert message in refusal(line)
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    found = first_adapters(filled(LoraConfig, validated_args(line)))
    assert found == {name: tmp_path / "both" / name for name in ("a", "b")}
    path = tmp_path / "both" / "a"
    assert first_adapters(LoraConfig(lora_rank=8, lora_adapters=["a"], lora_adapter_path=str(path))) == {
        None: path
    }


TREE = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
SEVERAL = {
    "lora_rank": 8,
    "no_lora_merge": True,
    "lora_adapters": ["a", "b"],
    "lora_adapter_key": "source_name",
}

ON_SGLANG = {**SEVERAL, "rollout_engine": "sglang", "num_gpus_per_node": 8}


@pytest.fixture
def two_sources(data, tmp_path):
    """A file of two sources of prompts, which have the names of adapters."""
    sources = "".join(f"- {{name: {name}, path: {data}, weight: 1}}\n" for name in ("a", "b"))
    (tmp_path / "both.yaml").write_text(f"sources:\n{sources}")
    return tmp_path / "both.yaml"


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_several_adapters_have_names_and_their_samples_say_so(words, refusal, two_sources, data, trainer):
    line = words(**SEVERAL, train_backend=trainer, prompt_data=two_sources)
    config = filled(LoraConfig, validated_args(line))
    assert config.named_adapters == ["a", "b"] and config.served_adapters == ("a", "b")
    assert not filled(LoraConfig, validated_args(words(lora_adapters=["a"]))).named_adapters
    said = refusal(words(**SEVERAL, prompt_data=data))
    assert said.startswith("--prompt-data: ") and said.endswith(
        "its metadata have no source_name (wanted: one of --lora-adapters, a, b)"
    )
    said = refusal(words(**SEVERAL | {"lora_adapters": ["a", "c"]}, prompt_data=two_sources))
    assert "its metadata have source_name 'b' (wanted: one of --lora-adapters, a, c)" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_adapters": ["a", "b/../c"]}, "--lora-adapters a b/../c: 'b/../c' is no name"),
        ({"lora_adapters": ["a", "b", "a"]}, "--lora-adapters a b a: names an adapter twice"),
        ({"no_lora_merge": None}, "--lora-adapters a b: needs --no-lora-merge"),
        ({"lora_adapters": ["a", "b" * 101]}, "--lora-adapters a " + "b" * 101),
        ({"lora_save_merged": True}, "--lora-save-merged True: not with --lora-adapters a b (a merged"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo: not with --lora-adapters a b"),
        ({"normalize_advantages": True}, "--normalize-advantages True: not with --lora-adapters a b"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            "--overlap-param-gather True: not with",
        ),
        ({"keep_old_actor": True}, "--keep-old-actor True: not with --lora-adapters a b"),
        (
            {"use_slime_router": True, "slime_router_middleware_paths": TREE},
            f"--slime-router-middleware-paths {TREE}: not with --lora-adapters a b (it knows tokens",
        ),
        ({"global_batch_size": 8, "n_samples_per_prompt": 16}, "--global-batch-size 8: not with --lora-ada"),
        (
            {"n_samples_per_prompt": 6, "global_batch_size": 24, "micro_batch_size": 4},
            "--n-samples-per-prompt 6: not with --lora-adapters a b (wanted: a multiple of 4, a micro-batch",
        ),
    ],
)
def test_what_is_not_done_with_several_adapters_is_named(words, refusals, two_sources, changes, message):
    said = refusals(words(**SEVERAL | changes, prompt_data=two_sources))
    assert [line for line in said if line.startswith(message)], said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sglang_tokenizer_worker_num": 2},
            "--sglang-tokenizer-worker-num 2: not with --no-lora-merge, one",
        ),
        ({"sglang_max_loaded_loras": 1}, "(wanted: at least 8, or leave it out)"),
        ({"sglang_max_loaded_loras": 8, "sglang_max_loras_per_batch": 9}, "(wanted: at least 9, or leave it"),
        (
            {
                "sglang_max_loaded_loras": 3,
                "sglang_max_loras_per_batch": 2,
                "sglang_lora_paths": ["c", "d=/d"],
            },
            "--sglang-max-loaded-loras 3: not with --no-lora-merge, an engine would forget the adapter that "
            "was asked for least (wanted: at least 4, or leave it out)",
        ),
        ({"sglang_lora_paths": ["b=/elsewhere"]}, "--sglang-lora-paths: an adapter is called b, as one"),
        ({"sglang_lora_paths": ["a"]}, "--sglang-lora-paths: an adapter is called a, as one"),
        (
            {"sglang_lora_paths": ['{"lora_name": "a", "lora_path": "/a"}']},
            "--sglang-lora-paths: an adapter is called a, as one",
        ),
        ({"sglang_dp_size": 2}, "--sglang-dp-size 2: not with --no-lora-merge"),
    ],
)
def test_options_by_which_sglang_would_not_have_all_adapters_are_named(
    words, refusals, two_sources, monkeypatch, changes, message
):
    as_installed(monkeypatch)
    said = [
        text for text in refusals(words(**ON_SGLANG, **changes, prompt_data=two_sources)) if "lora" in text
    ]
    assert len(said) == 1 and message in said[0], said


@pytest.mark.parametrize(
    "changes",
    [
        {"sglang_max_loaded_loras": 8, "sglang_lora_paths": ["c"]},
        {"sglang_max_loaded_loras": 2, "sglang_max_loras_per_batch": 2},
    ],
)
def test_options_by_which_sglang_has_all_adapters_are_taken(words, two_sources, monkeypatch, changes):
    as_installed(monkeypatch)
    assert validated_args(words(**ON_SGLANG, **changes, prompt_data=two_sources)).lora_adapters == ["a", "b"]
