"""What a soak says of a process that grows, and of a run that becomes slower."""

import subprocess
import sys

import pytest

from benchmarks.soak import LOOK_S, Life, Look, growth, measure_process, windows

LOOKS = 400
WARM_UP = 300.0


def life(megabytes_per_look: float) -> Life:
    found = Life("engine")
    for index in range(LOOKS):
        found.at.append(index * LOOK_S)
        found.memory.append(round((100 + megabytes_per_look * index) * 1e6))
        found.descriptors.append(40)
        found.threads.append(8)
    return found


@pytest.mark.parametrize(("megabytes_per_look", "ratio"), [(0.0, 1.0), (0.5, 1.846)])
def test_memory_at_the_end_stands_beside_that_after_the_warm_up(
    megabytes_per_look: float, ratio: float
) -> None:
    found = growth(life(megabytes_per_look), WARM_UP)
    assert found is not None
    assert found["memory"]["ratio"] == pytest.approx(ratio, abs=0.01)
    assert found["descriptors"]["ratio"] == 1


def test_a_life_no_longer_than_its_warm_up_tells_nothing() -> None:
    assert growth(life(0.0), LOOKS * LOOK_S) is None
    assert growth(Life("gone at once"), WARM_UP) is None


def test_a_recovery_does_not_count_as_slowness_but_slower_steps_do() -> None:
    def looks(late_steps: int) -> list[Look]:
        found, steps = [], 0
        for index in range(LOOKS):
            recovers = 350 <= index < 360
            steps += 0 if recovers else (10 if index < LOOKS / 2 else late_steps)
            found.append(Look(index * LOOK_S, steps, 0, 100 * steps, 0))
        return found

    assert windows(looks(10), WARM_UP, 400)["steps_per_second"]["ratio"] == pytest.approx(1)
    assert windows(looks(8), WARM_UP, 400)["steps_per_second"]["ratio"] == pytest.approx(0.8)
    assert windows(looks(8), WARM_UP, 400)["log_bytes_per_step"] == {"first": 100, "last": 100}


_FORKED = """
import os
held = bytearray(b"a" * 40_000_000)
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    raise SystemExit
for step in ("forked", "copied", "grown"):
    if step == "copied":
        for at in range(0, len(held), 4096):
            held[at] = 98
    if step == "grown":
        more = bytearray(b"a" * 40_000_000)
    print(os.getpid(), flush=True)
    input()
"""


def test_pages_that_a_forked_process_copies_are_no_growth() -> None:
    """A run forks its processes from one that has imported everything, to which they write more and more."""
    found = Life("forked")
    with subprocess.Popen(
        [sys.executable, "-c", _FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for at in range(3):
            measure_process(found, int(process.stdout.readline()), at)
            process.stdin.write("\n")
            process.stdin.flush()
    forked, copied, grown = found.memory
    assert copied - forked < 4_000_000 and grown - copied > 36_000_000
