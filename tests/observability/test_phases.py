"""The lines of a start."""

import io
import re
import time

from slime.observability.phases import Phases


def lines_of(stream: io.StringIO) -> list[str]:
    return [re.sub(r"^\[ *\d+:\d\d\] ", "", line) for line in stream.getvalue().splitlines()]


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


def test_each_phase_is_told_with_the_time_since_the_command() -> None:
    stream = io.StringIO()
    phases = Phases(stream, time.time() - 125)
    phases.reached("Ray is up", then="starting engines")
    phases.reached("engines are ready")
    assert re.fullmatch(
        r"\[  2:0[5-9]\] Ray is up; starting engines\n\[  2:\d\d\] engines are ready\n", stream.getvalue()
    )


def test_a_long_phase_is_told_again_until_it_ends() -> None:
    stream = io.StringIO()
    phases = Phases(stream, time.time(), interval=0.01)
    phases.begin("checking flags")
    wait_for(stream, "still checking flags")
    phases.reached("Ray is up", then="starting engines")
    wait_for(stream, "still starting engines")
    phases.reached("engines are ready", then="loading the trainer")
    wait_for(stream, "still loading the trainer")
    phases.end()
    told = stream.getvalue()
    assert [line for line in lines_of(stream) if "still" not in line] == [
        "Ray is up; starting engines",
        "engines are ready; loading the trainer",
    ]
    time.sleep(0.05)
    assert stream.getvalue() == told


def test_nothing_follows_the_last_phase_or_the_end() -> None:
    stream = io.StringIO()
    phases = Phases(stream, time.time())
    phases.begin("checking flags")
    phases.reached("a", then="b")
    phases.reached("c")
    phases.reached("d", then="e")
    assert lines_of(stream) == ["a; b", "c"]
