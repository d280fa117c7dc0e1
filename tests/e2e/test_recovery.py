"""With ``--use-fault-tolerance`` a run goes on after an engine was killed, with as many engines as before."""

import itertools
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.processes.forked import VARIABLE as FORK_SERVER
from slime.utils.types import Sample
from tests.e2e.plugins import waiting_reward

pytestmark = pytest.mark.e2e

_KILL_AT = 24  # a sample of the second rollout
VICTIM = "SLIME_TEST_VICTIM"


async def deadly_reward(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Kills an engine in the middle of the second rollout and notes its process id."""
    note = Path(os.environ[VICTIM])
    if (sample.index or 0) >= _KILL_AT and not note.exists():
        pid = max(_engines())
        note.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
    return await waiting_reward(args, sample, **kwargs)


def deadly_updates(args: Namespace) -> None:
    """Makes the trainer kill an engine in the middle of the second weight update (it stays version 2)."""
    # Late: the driver and the rollout manager import this module too.
    from slime.backends.megatron_utils.hf_weights import HfWeights

    buckets, updates = HfWeights.buckets, itertools.count()

    def killing(self: HfWeights, size: int) -> Iterator[Any]:
        note, update = Path(os.environ[VICTIM]), next(updates)
        for index, bucket in enumerate(buckets(self, size)):
            if args.rank == 0 and update == 1 and index == 1:
                pid = max(_engines())
                note.write_text(str(pid))
                os.kill(pid, signal.SIGKILL)
            yield bucket

    HfWeights.buckets = killing


def _engines() -> list[int]:
    """Engine servers of the run that this process belongs to: they were forked from the same server."""
    mark = f"{FORK_SERVER}={os.environ[FORK_SERVER]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            mine = mark in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mine and b"embedded_engine" in command and b"supervisor" not in command:
            found.append(int(entry.name))
    return found


COLOCATED = ["--colocate", "--actor-num-gpus-per-node", 2]
GENERATING = ["--custom-rm-path", "tests.e2e.test_recovery.deadly_reward"]
UPDATING = [
    *("--custom-megatron-init-path", "tests.e2e.test_recovery.deadly_updates"),
    *("--update-weight-buffer-size", 100_000),
]


# While a disaggregated run generates, test_slime_router.py kills one, and asks for more.
@pytest.mark.parametrize(
    ("layout", "killer"),
    [(COLOCATED, GENERATING), ([], UPDATING), (COLOCATED, UPDATING)],
    ids=["colocated, while generating", "disaggregated, during an update", "colocated, during an update"],
)
def test_a_killed_engine_is_replaced_and_updated(
    layout: list[object], killer, start, gate, rl_flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, last_rollout = tmp_path / "victim", gate(64)
    monkeypatch.setenv(VICTIM, str(note))
    flags = ["--use-fault-tolerance", "--rollout-num-gpus", 2, "--num-rollout", 5]
    flags += ["--custom-rm-path", "tests.e2e.plugins.waiting_reward"]
    run = start([*rl_flags, *flags, *layout, *killer])
    run.wait_for(note.exists, "the death of an engine")
    run.wait_for(lambda: len(run.rows("train")) >= 3, "training after it")
    assert len(run.engines()) == 2
    assert int(note.read_text()) not in run.engines()
    last_rollout.touch()
    run.expect_success()
    assert len(run.rows("train")) == 5
    run.expect_no_processes()
