"""A killed run goes on as if it had never stopped."""

from pathlib import Path

import pytest

from tests.e2e.test_ppo import PPO

pytestmark = pytest.mark.e2e

TWO = ["--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1]
# The flags, and the last of the checkpoints that a rollout writes.
LAYOUTS = {
    "two trainer processes and a critic": ([*TWO, *PPO, "--num-critic-only-steps", 1], "critic"),
    "two trainer processes": (TWO, ""),
    "two processes of FSDP": ([*TWO, "--train-backend", "fsdp"], ""),
}
WAITING = ["--custom-rm-path", "tests.e2e.plugins.waiting_reward"]
VARYING = ("time", "_per_sec", "perf/", "run_id", "prefix_cache_hit_rate", "avg_cached_tokens", "recomputed")


def numbers(rows: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """What must repeat exactly: everything but the clock and who shared a prompt with whom."""
    return {
        step: {k: v for k, v in row.items() if not any(word in k for word in VARYING)}
        for step, row in rows.items()
    }


@pytest.mark.parametrize(
    "layout",
    [
        "two trainer processes and a critic",
        pytest.param("two trainer processes", marks=pytest.mark.nightly),
        # Without a cluster: tests/backends/fsdp_utils/test_checkpoint.py.
        pytest.param("two processes of FSDP", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_with_the_metrics_of_one_that_never_stopped(
    layout: str, start, gate, rl_flags, data, tmp_path: Path
) -> None:
    own, last = LAYOUTS[layout]

    def flags(save: Path) -> list[object]:
        layout_flags = [*own, "--colocate", "--rollout-shuffle"]
        saving = ["--save", save, "--load", save, "--save-interval", 1, "--num-rollout", 4]
        saving += ["--keep-checkpoints", 2]
        evaluating = ["--eval-interval", 1, "--eval-prompt-data", "calc", data / "eval.jsonl"]
        return [*rl_flags, *layout_flags, *saving, *evaluating, *WAITING]

    last_rollout = gate(48)
    last_rollout.touch()
    whole = start(flags(tmp_path / "whole")).expect_success()

    metrics = tmp_path / "killed.jsonl"
    last_rollout.unlink()
    killed = start(flags(tmp_path / "killed"), metrics=metrics)
    markers = [tmp_path / "killed" / role / "latest_checkpointed_iteration.txt" for role in ("", last)]
    # Killed soon after a checkpoint, as a rule before the evaluation that is due then.
    killed.wait_for(
        lambda: all(marker.exists() and int(marker.read_text()) >= 1 for marker in markers),
        "the second checkpoint",
    )
    killed.kill()
    killed.expect_no_processes()
    assert len(killed.rows("train")) < 4, "the run was over before it was killed"

    newest = max((tmp_path / "killed").glob("iter_???????"))
    shard = next(newest.rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    last_rollout.touch()
    resumed = start(flags(tmp_path / "killed"), metrics=metrics).expect_success()
    assert f"{newest.name}: {shard.relative_to(newest)} has " in resumed.output
    for axis in ("train", "rollout", "eval"):
        assert numbers(resumed.rows(axis)) == numbers(whole.rows(axis))
    kept = [path.name for path in (tmp_path / "killed" / last).glob("iter_*")]
    assert sorted(kept) == ["iter_0000002", "iter_0000003"]
