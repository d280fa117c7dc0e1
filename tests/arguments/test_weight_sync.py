"""Flags of changes over a directory: what they need, and what they cannot be with."""

import importlib.util

import pytest

from slime.arguments import validated_args
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


def test_engines_whose_machines_make_no_checkpoints_are_refused(words, refusals, changes):
    others = dict(rollout_num_gpus=None, rollout_external_engine_addrs=["http://127.0.0.1:1"])
    said = refusals(words(**changes | others))
    wanted = "--update-weight-local-checkpoint-dir /tmp/local: with --rollout-external-engine-addrs"
    assert any(line.startswith(wanted) for line in said)


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
