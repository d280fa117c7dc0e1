"""``--release-train``: what it decides, and what it cannot be with."""

import pytest

from slime.arguments import validated_args


@pytest.fixture
def releasing(words, tmp_path):
    def build(**changes):
        disk = dict(update_weight_transport="disk", update_weight_disk_dir=tmp_path / "shared")
        return words(**dict(release_train=True, save=tmp_path / "saved", **disk) | changes)

    return build


def test_the_trainer_ends_instead_of_being_offloaded_and_is_saved_after_each_rollout(releasing, notes):
    args = validated_args(releasing())
    assert (args.colocate, args.offload_train, args.offload_rollout) == (True, False, True)
    assert (args.save_interval, args.max_failed_saves, args.update_weights_interval) == (1, 0, 1)
    assert notes(releasing()) == []
    apart = validated_args(releasing(colocate=None, rollout_num_gpus=1))
    assert (apart.offload_train, apart.offload_rollout) == (False, False)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (dict(save_interval=5), "--save-interval 5: has no effect with --release-train"),
        (dict(async_save=True), "--async-save: has no effect with --release-train"),
        (dict(max_failed_saves=5), "--max-failed-saves 5: has no effect with --release-train"),
        (dict(offload_train=True), "--offload-train: has no effect with --release-train"),
        (dict(no_save_optim=True), "--no-save-optim: with --release-train optimizer and learning rate begin"),
        (
            {"async": True, "colocate": None, "rollout_num_gpus": 1, "update_weights_interval": 2},
            "--update-weights-interval 2: has no effect with --release-train",
        ),
    ],
)
def test_what_it_decides_otherwise_is_told(releasing, notes, others, said):
    assert any(line.startswith(said) for line in notes(releasing(**others)))
    args = validated_args(releasing(**others))
    assert (args.save_interval, args.async_save, args.max_failed_saves, args.offload_train) == (
        1,
        False,
        0,
        False,
    )
    assert args.update_weights_interval == 1


def test_without_a_trainer_it_changes_nothing(releasing, notes):
    line = releasing(debug_rollout_only=True, save_interval=5)
    assert "--release-train: has no effect with --debug-rollout-only, there is no trainer" in notes(line)
    args = validated_args(line)
    assert (args.save_interval, args.max_failed_saves) == (5, 2)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            dict(save=None),
            "--release-train: the trainer goes on from what it saved after each rollout (wanted",
        ),
        (
            dict(update_weight_transport=None, update_weight_disk_dir=None),
            "--release-train: with --update-weig",
        ),
        (
            dict(update_weight_mode="delta", update_weight_local_checkpoint_dir="/tmp/local", colocate=None),
            "--release-train: with --update-weight-transport disk and --update-weight-mode delta",
        ),
        (dict(train_backend="fsdp"), "--release-train: not supported with --train-backend fsdp"),
        (dict(keep_old_actor=True, colocate=None), "--keep-old-actor: with --release-train"),
        (dict(advantage_estimator="ppo"), "--use-critic or --advantage-estimator ppo: with --release-train"),
        (dict(lora_rank=4), "--lora-rank 4: with --release-train"),
        (dict(use_fault_tolerance=True, trainer_standbys=1), "--trainer-standbys 1: with --release-train"),
        (
            dict(use_fault_tolerance=True, trainer_snapshot_interval=1),
            "--trainer-snapshot-interval 1: with --release-train",
        ),
        (dict(debug_train_only=True, colocate=None), "--debug-train-only: with --release-train"),
    ],
)
def test_what_it_cannot_be_with_is_refused_by_name(releasing, refusals, others, said):
    if others.get("colocate", True) is None and "debug_train_only" not in others:
        others = others | dict(rollout_num_gpus=1)
    assert [line for line in refusals(releasing(**others)) if line.startswith(said)]
