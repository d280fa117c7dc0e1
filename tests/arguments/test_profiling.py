"""Profiles that would be empty are refused before anything starts, and so is a record of no GPU's memory."""

import pytest

from slime.arguments import validated_args
from tests.each import hold_each

PROFILER = ["--use-pytorch-profiler"]
REFUSED = {
    "--profile-step-end 1: wanted more than --profile-step-start 1": [
        *(*PROFILER, "--profile-step-start", "1", "--profile-step-end", "1"),
    ],
    "--profile-step-start 10: wanted less than --num-rollout 2": PROFILER,
    "--profile-ranks 1: wanted less than 1, the trainer's ranks": [
        *(*PROFILER, "--profile-ranks", "0", "1", "--profile-step-start", "1"),
    ],
    "--profile-target train_overall train_actor: train_overall holds the others": [
        *(*PROFILER, "--profile-step-start", "1", "--profile-target", "train_overall", "train_actor"),
    ],
    "--tensorboard-dir tb: only profiles go there (wanted: --use-pytorch-profiler, or --use-tensorboard": [
        *("--tensorboard-dir", "tb"),
    ],
    "--memory-snapshot-path a/b: is a path (wanted: the end of a file name": [
        *("--memory-snapshot-path", "a/b"),
    ],
    "--record-memory-history: there is no GPU here (wanted: one, whose memory is recorded)": [
        *("--record-memory-history",),
    ],
    "--memory-recorder memray: not supported (wanted: torch, which knows what lies on a GPU)": [
        *("--memory-recorder", "memray"),
    ],
    "--profile: not supported (wanted: --use-pytorch-profiler, without it)": ["--profile"],
}


def test_what_would_profile_nothing_is_refused(words, refusal) -> None:
    def check(said: str) -> None:
        assert refusal([*words(), *REFUSED[said]]).startswith(said)

    hold_each(REFUSED, check)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ([], "outputs/profile"),
        (["--save", "run"], "run/profile"),
        (["--tensorboard-dir", "traces"], "traces"),
    ],
)
def test_profiles_go_into_the_directory_of_the_run(flags, place, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = validated_args([*words(), *PROFILER, "--profile-step-start", "0", *flags])
    assert args.tensorboard_dir == place
