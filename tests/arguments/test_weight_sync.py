"""Flags of changes over a directory: what they need, and what they cannot be with."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slime.arguments import validated_args
from slime.arguments.validate.shard_engines import bad_shards
from tests.arguments.sglang_options import as_installed

ENGINES = dict(colocate=None, rollout_num_gpus=1)


@pytest.fixture
def changes(tmp_path):
    places = dict(update_weight_disk_dir=tmp_path / "shared", update_weight_local_checkpoint_dir="/tmp/local")
    return dict(**ENGINES, update_weight_mode="delta", update_weight_transport="disk", **places)


def test_changes_over_a_directory_are_accepted_with_every_encoding_and_checksum(words, notes, changes):
    for encoding, checksum in (("xor", "blake3"), ("overwrite", "adler32"), ("overwrite", "xxh3-128")):
        own = dict(update_weight_delta_encoding=encoding, update_weight_delta_checksum=checksum)
        assert notes(words(**changes, **own)) == []
        args = validated_args(words(**changes, **own))
        found = args.update_weight_delta_encoding, args.update_weight_delta_checksum
        assert found == (encoding, checksum)


def of_versions(args, version_dir, rollout_engines):
    """A user's function."""


def of_something_else(args):
    """One that cannot be called so."""


def test_a_function_that_is_told_of_versions_is_looked_at(words, notes, refusals, tmp_path):
    flag, disk = "--custom-update-weight-post-write-path", dict(ENGINES, update_weight_transport="disk")
    disk["update_weight_disk_dir"] = tmp_path / "shared"
    own, wrong = (f"{__name__}.{one.__name__}" for one in (of_versions, of_something_else))
    assert notes(words(**disk, custom_update_weight_post_write_path=own)) == []
    (said,) = notes(words(custom_update_weight_post_write_path=own))
    assert said == f"{flag} {own}: has no effect without --update-weight-transport disk"
    (said,) = refusals(words(**disk, custom_update_weight_post_write_path=wrong))
    assert said.startswith(f"{flag} {wrong}: its parameters are (args) (wanted: (args, version_dir, rollout")


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (dict(colocate=True, rollout_num_gpus=None), "--update-weight-mode delta: with --colocate"),
        (
            dict(update_weight_local_checkpoint_dir=None),
            "--update-weight-local-checkpoint-dir: missing (wanted: a directory on each engine's machine",
        ),
        (
            dict(update_weight_local_checkpoint_dir="local"),
            "--update-weight-local-checkpoint-dir local: is no absolute path (wanted: one, as it names",
        ),
        (dict(update_weight_disk_dir="/tmp/local"), "--update-weight-local-checkpoint-dir /tmp/local: is --"),
    ],
)
def test_what_changes_cannot_do_without_is_named(words, refusal, changes, others, said):
    assert refusal(words(**changes | others)).startswith(said)


def test_a_url_takes_the_place_of_the_directory(words, notes, changes):
    for mode in ("delta", "full"):
        own = dict(update_weight_disk_dir="s3://bucket/run7", update_weight_mode=mode)
        assert notes(words(**changes | own)) == []
        assert validated_args(words(**changes | own)).update_weight_disk_dir == "s3://bucket/run7"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            dict(update_weight_disk_dir="s3://k:secret@bucket/run7"),
            "s3://...: has a user or a password in it",
        ),
        (dict(update_weight_disk_dir="memory://run7"), "memory://run7: is the memory of one process"),
        (dict(update_weight_disk_dir="gs://bucket/run7"), "gs://bucket/run7: what opens it is not installed"),
        (
            dict(update_weight_mode="full", update_weight_local_checkpoint_dir=None),
            "s3://bucket/run7: without --update-weight-local-checkpoint-dir, from which engines load",
        ),
        (
            dict(update_weight_transport="nccl", update_weight_disk_dir="s3://k:secret@bucket/run7"),
            "s3://...: has a user or a password in it",
        ),
    ],
)
def test_urls_that_cannot_be_used_are_refused_and_no_secret_is_shown(
    words, refusals, changes, monkeypatch, others, said
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    lines = refusals(words(**changes | dict(update_weight_disk_dir="s3://bucket/run7") | others))
    assert any(line.startswith(f"--update-weight-disk-dir {said}") for line in lines), lines
    assert "secret" not in str(lines)


def test_a_local_directory_is_not_that_of_a_url(words, refusal, changes):
    said = refusal(words(**changes | dict(update_weight_disk_dir="file:///tmp/local")))
    assert said.startswith("--update-weight-local-checkpoint-dir /tmp/local: is --update-weight-disk-dir")


def test_engines_whose_machines_make_no_checkpoints_are_refused(words, refusals, changes):
    others = dict(rollout_num_gpus=None, rollout_external_engine_addrs=["http://127.0.0.1:1"])
    said = refusals(words(**changes | others))
    wanted = "--update-weight-local-checkpoint-dir /tmp/local: with --rollout-external-engine-addrs"
    assert any(line.startswith(wanted) for line in said)


def test_models_of_an_engine_are_selected_where_its_routes_can(words, refusals, changes, monkeypatch):
    assert validated_args(words(update_weight_selector="target")).update_weight_selector == "target"
    where = (
        "--update-weight-selector target: with --update-weight-transport disk and --update-weight-mode delta"
    )
    (said,) = refusals(words(**changes, update_weight_selector="target"))
    assert said.startswith(where)
    for engine, why in {
        "embedded": "with --rollout-engine embedded, which drafts no tokens (wanted: all or target)",
        "sglang": "without --enable-mtp-training, which trains what engines draft with",
    }.items():
        as_installed(monkeypatch)
        said = refusals(words(update_weight_selector="draft", rollout_engine=engine))
        assert f"--update-weight-selector draft: {why}" in said


def test_engines_that_span_machines_are_refused(words, refusals, changes):
    others = dict(rollout_num_gpus=4, rollout_num_gpus_per_engine=4, num_gpus_per_node=2)
    said = refusals(words(**changes | others, actor_num_gpus_per_node=1))
    assert any("with engines of 4 GPUs, which span machines of 2" in line for line in said)


GROUP = dict(**ENGINES, update_weight_mode="delta")
NO_GROUP = "--update-weight-mode delta: with --update-weight-transport nccl and "


def test_changes_over_the_process_group_are_for_embedded_engines(words, notes, refusals, monkeypatch):
    for encoding, checksum in (("xor", "xxh3-128"), ("overwrite", "blake3")):
        own = dict(update_weight_delta_encoding=encoding, update_weight_delta_checksum=checksum)
        assert notes(words(**GROUP, **own)) == []
        assert validated_args(words(**GROUP, **own)).update_weight_mode == "delta"
    as_installed(monkeypatch)
    elsewhere = dict(rollout_num_gpus=None, rollout_external_engine_addrs=["http://127.0.0.1:1"])
    for others, named in {
        "--rollout-engine sglang, which takes whole weights": dict(rollout_engine="sglang"),
        "--rollout-external-engine-addrs, whose engines may have nothing": elsewhere,
        "--no-lora-merge, whose base is sent once": dict(lora_rank=4, no_lora_merge=True),
    }.items():
        said = refusals(words(**GROUP | named))
        assert any(line.startswith(NO_GROUP + others) for line in said), (others, said)


NIXL = dict(**ENGINES, update_weight_transport="nixl")


def test_engines_that_cannot_read_the_trainers_memory_are_refused(words, notes, refusals, monkeypatch):
    installed = {"nixl": object(), "nixl_cu12": object()}
    found = importlib.util.find_spec
    has = lambda name, *rest: installed.get(name) if "nixl" in name else found(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", has)
    assert notes(words(**NIXL)) == []
    assert validated_args(words(**NIXL)).update_weight_transport == "nixl"
    as_installed(monkeypatch)
    elsewhere = dict(rollout_num_gpus=None, rollout_external_engine_addrs=["http://127.0.0.1:1"])

    def require(others, named):
        said = refusals(words(**NIXL | others))
        wanted = f"--update-weight-transport nixl: {named}"
        assert any(line.startswith(wanted) for line in said), (wanted, said)

    require(dict(rollout_engine="sglang"), "with --rollout-engine sglang, which reads no trainer's memory")
    require(elsewhere, "with --rollout-external-engine-addrs, which may have no NIXL")
    require(dict(update_weight_mode="delta"), "with --update-weight-mode delta (wanted: full)")
    require(dict(colocate=True, rollout_num_gpus=None), "with --colocate (wanted: nccl")
    for missing in ("nixl_cu12", "nixl"):
        del installed[missing]
        require({}, "NIXL is not installed (wanted: pip install -c constraints/cpu.txt -e '.[nixl]')")


FULLY_ASYNC = dict(rollout_function_path="slime.rollout.fully_async_rollout.generate_rollout_fully_async")
OWN = "slime.rollout.sleep_rollout.sleep"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_answers_may_go_on_over_an_update_where_some_are_under_way(words, notes, refusal, mode):
    own = dict(**ENGINES, pause_generation_mode=mode)
    assert not [line for line in notes(words(**own, **FULLY_ASYNC)) if "pause" in line]
    assert validated_args(words(**own, **FULLY_ASYNC)).pause_generation_mode == mode
    assert not [line for line in notes(words(**own, rollout_function_path=OWN)) if "pause" in line]
    for others in (own, dict(pause_generation_mode=mode, rollout_function_path=OWN)):
        (line,) = [line for line in notes(words(**others)) if "pause" in line]
        assert line.startswith(f"--pause-generation-mode {mode}: has no effect, no answer is under way when")
    masked = dict(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    said = refusal(words(**own, **FULLY_ASYNC, **masked))
    assert said.startswith(f"--pause-generation-mode {mode}: with --mask-offpolicy-in-partial-rollout")


SHARDS = dict(colocate=True, update_weight_transport="shards", rollout_num_gpus=None)
FROM_RANK = "--update-weight-transport shards: "
IN_SGLANG = "with --rollout-engine sglang and "


def test_weights_go_from_rank_to_rank_where_engines_share_the_trainers_gpus(words, notes):
    assert notes(words(**SHARDS)) == []
    assert validated_args(words(**SHARDS)).update_weight_transport == "shards"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (dict(update_weight_mode="delta"), "with --update-weight-mode delta (wanted: full)"),
        (dict(train_backend="fsdp"), "with --train-backend fsdp, whose ranks hold no slices of weights that"),
        (dict(rollout_num_gpus=2), "engines take 2 GPUs, and the trainer has 1 of them (wanted: no engine"),
        (
            dict(actor_num_gpus_per_node=3, rollout_num_gpus=3, rollout_num_gpus_per_engine=3),
            "engines of 3 ranks: do not divide num_attention_heads",
        ),
    ],
)
def test_what_cannot_go_from_rank_to_rank_is_refused(words, refusals, others, said):
    found = refusals(words(**{**SHARDS, **others}))
    assert any(line.startswith(FROM_RANK + said) for line in found), found


def test_weights_go_from_rank_to_rank_to_engines_elsewhere_but_not_to_sglang_s(words):
    elsewhere = {**SHARDS, **ENGINES}
    args = validated_args(words(**elsewhere))
    assert args.update_weight_transport == "shards" and not args.colocate
    args.rollout_engine = "sglang"
    said = "with --rollout-engine sglang and without --colocate, whose ranks receive only what one rank"
    (line,) = bad_shards(args)
    assert line.startswith(FROM_RANK + said)
    args.rollout_external = True  # a server says what it is when it is asked
    assert not list(bad_shards(args))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (dict(sglang_dp_size=2), "--sglang-dp-size 2 (wanted: 1, or nccl)"),
        (
            dict(sglang_enable_dp_attention=True),
            "--sglang-enable-dp-attention True (wanted: without, or nccl)",
        ),
        (dict(sglang_speculative_algorithm="EAGLE"), "--sglang-speculative-algorithm EAGLE (wanted: without"),
        (dict(sglang_offload_group_size=2), "--sglang-offload-group-size 2 (wanted: without, or nccl)"),
        (
            dict(sglang_device="cpu", ffn_hidden_size=48),
            "--sglang-device cpu, which pads intermediate_size 48 (config.json; wanted: a multiple of 32, or",
        ),
        (dict(num_experts=4), "experts, which its kernels lay out each in a way of its own (wanted: nccl)"),
        (dict(sglang_config="models.yaml"), "--sglang-config, whose groups may hold weights otherwise"),
    ],
)
def test_layouts_of_sglang_that_are_not_known_are_refused(words, monkeypatch, others, said):
    as_installed(monkeypatch)
    args = validated_args(words(**SHARDS, rollout_engine="sglang"))  # with SGLang's own defaults
    assert not list(bad_shards(args))
    vars(args).update(others)
    assert any(line.startswith(FROM_RANK + IN_SGLANG + said) for line in bad_shards(args))


def test_on_a_cpu_sglang_pads_heads_for_several_ranks(words, monkeypatch):
    as_installed(monkeypatch)
    args = validated_args(words(**SHARDS, rollout_engine="sglang", sglang_device="cpu"))
    assert not list(bad_shards(args))
    (model,) = args.served_models
    groups = [replace(group, num_gpus_per_engine=4) for group in model.server_groups]
    args.served_models, args.num_query_groups = [replace(model, server_groups=groups)], 2
    (said,) = bad_shards(args)
    assert said.endswith("which pads num_key_value_heads 2 (config.json; wanted: a multiple of 4, or nccl)")


def test_engines_of_a_quantised_checkpoint_and_of_an_unknown_layout_are_refused(words, tmp_path):
    args = validated_args(words(**SHARDS))
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (model,) = args.served_models
    args.served_models = [replace(model, model_path=str(tmp_path))]
    (line,) = bad_shards(args)
    assert line == f"{FROM_RANK}{tmp_path} is quantised (fp8), and only whole weights are (wanted: nccl)"
    args.served_models, args.enable_mtp_training = [model], True
    (line,) = bad_shards(args)
    assert line.startswith(f"{FROM_RANK}with --enable-mtp-training, whose layers engines have as a draft")
    args.enable_mtp_training, args.model_type = False, "gemma3_text"
    (line,) = bad_shards(args)
    assert line.startswith(
        f"{FROM_RANK}model_type gemma3_text: how an engine's ranks hold its weights is not"
    )
