"""Flags of changes for engines of others: what followers make possible, and what they cannot do."""

import pytest

from slime.arguments import validated_args

ELSEWHERE = dict(colocate=None, rollout_external_engine_addrs=["http://127.0.0.1:1"])
DELTA = dict(update_weight_mode="delta", update_weight_transport="disk")
ALONE = dict(colocate=None, debug_train_only=True, publish_weights=True)


@pytest.mark.parametrize("place", ["/tmp/shared", "s3://bucket/run7"])
@pytest.mark.parametrize("whose", [ELSEWHERE, ALONE])
def test_changes_for_engines_of_others_need_no_local_directory_of_the_run(words, notes, whose, place):
    flags = words(**whose, **DELTA, update_weight_disk_dir=place)
    assert notes(flags) == []
    assert validated_args(flags).update_weight_mode == "delta"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            dict(ELSEWHERE, **DELTA, update_weight_local_checkpoint_dir="/tmp/local"),
            "--update-weight-local-checkpoint-dir /tmp/local: with --rollout-external-engine-addrs, on w",
        ),
        (
            dict(ELSEWHERE, **DELTA, check_weight_update_equal=True),
            "--update-weight-mode delta: with --rollout-external-engine-addrs and --check-weight-update-eq",
        ),
        (
            dict(ELSEWHERE, **DELTA, lora_rank=4, no_lora_merge=True),
            "--update-weight-mode delta: with --rollout-external-engine-addrs and --no-lora-merge",
        ),
        (
            dict(ALONE, **DELTA, debug_train_only=None, rollout_num_gpus=1),
            "--publish-weights: the run has engines, which get all weights (wanted: --debug-train-only)",
        ),
        (
            dict(ALONE, update_weight_transport="disk"),
            "--publish-weights: with --update-weight-transport disk and --update-weight-mode full (want",
        ),
        (
            dict(ALONE, **DELTA, update_weight_disk_dir="s3://k:secret@bucket/run"),
            "--update-weight-disk-dir s3://...: has a user or a password in it",
        ),
    ],
)
def test_what_followers_cannot_do_without_is_named(words, refusals, flags, said):
    found = refusals(words(**{"update_weight_disk_dir": "/tmp/shared", **flags}))
    assert any(line.startswith(said) for line in found), found
