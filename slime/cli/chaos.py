"""``slime chaos``: disturbs a real run at random moments, and says whether it heals."""

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from slime.arguments.core.config_files import expand
from slime.arguments.core.errors import UsageError
from slime.chaos.connections import refusal
from slime.chaos.disturbance import ENDS_THE_RUN, Disturbance, Outcome, Plan
from slime.chaos.faults import DEFAULT_KINDS, Kind
from slime.chaos.report import Findings, as_json, page
from slime.chaos.supervised import StartedRun
from slime.chaos.twins import differences, missing_steps
from slime.chaos.victims import DRIVER, MARK, ROLES, RunProcesses, command_line
from slime.observability.jsonl import read_metrics
from slime.processes.reaper import SHARED_MEMORY

_USAGE = (
    "slime chaos DIR [--faults N] [--seed N] [--kinds KIND,...] [--victims ROLE,...] [--twin] -- FLAG ..."
)
_FAULTS, _STUCK_AFTER_S, _SHM_LIMIT_MB = 5, 600.0, 512
_MB = 1 << 20
LEAVE_S = 60.0
"""Seconds that processes of a run have to go after its end."""


def run(words: Sequence[str]) -> int:
    """Exit status 1 if something was not as it should be."""
    own, flags = _split(words)
    asked = _parser().parse_args(own)
    try:
        plan, directory = _plan(asked), _new_directory(asked.directory)
        _require_checkpoints(flags)
    except UsageError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _leave)  # else it would leave the run behind
    findings = Findings([])
    twin = directory / "twin" if asked.twin else None
    if twin and (failure := _run_twin(flags, twin, findings)):
        print(f"error: {failure}", file=sys.stderr)
        return 2
    _disturb(flags, directory / "disturbed", plan, findings)
    _compare(directory / "disturbed", twin, findings)
    (directory / "chaos.json").write_text(json.dumps(as_json(plan, findings), indent=1) + "\n")
    (directory / "chaos.md").write_text(page(plan, findings))
    print(page(plan, findings))
    return int(bool(findings.problems))


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words before the first ``--``, and those behind it."""
    own = list(words)
    if "--" not in own:
        return own, []
    where = own.index("--")
    return own[:where], own[where + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime chaos", usage=_USAGE, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "directory", metavar="DIR", help="a new directory, for the runs and chaos.md, the report"
    )
    parser.add_argument("--faults", type=int, default=_FAULTS, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, victims and moments")
    parser.add_argument(
        "--kinds",
        default=",".join(DEFAULT_KINDS),
        help=f"which faults there are, of {', '.join(Kind)} (default: %(default)s)",
    )
    everybody = ",".join((DRIVER, *ROLES))
    parser.add_argument("--victims", default="", help=f"who is struck, of {everybody} (default: everybody)")
    parser.add_argument(
        "--shm-limit",
        type=int,
        default=_SHM_LIMIT_MB,
        metavar="MB",
        help="that shared memory may have for shm to fill it (default: %(default)s)",
    )
    parser.add_argument(
        "--twin", action="store_true", help="runs it undisturbed before, and wants the same metrics"
    )
    parser.add_argument(
        "--stuck-after",
        type=float,
        default=_STUCK_AFTER_S,
        metavar="SECONDS",
        help="without a step or a fault after which the run is stuck (default: %(default)g)",
    )
    return parser


def _plan(asked: argparse.Namespace) -> Plan:
    """
    Raises:
        UsageError: a kind of fault or a victim that there is not, or numbers that cannot be.
    """
    kinds, roles = _words(asked.kinds), _words(asked.victims)
    for option, given, known in (("--kinds", kinds, list(Kind)), ("--victims", roles, [DRIVER, *ROLES])):
        if unknown := [word for word in given if word not in known]:
            raise UsageError(f"{option}: found {unknown[0]!r} (wanted: of {', '.join(known)})")
    if not kinds:
        raise UsageError(f"--kinds: found none (wanted: of {', '.join(Kind)})")
    if [(role, kind) for role in roles for kind in kinds] == [ENDS_THE_RUN]:
        raise UsageError("--kinds term --victims driver: ends the run (wanted: other victims, or kinds)")
    if asked.faults < 1:
        raise UsageError(f"--faults: found {asked.faults} (wanted: 1 or more)")
    if not asked.stuck_after > 0:
        raise UsageError(f"--stuck-after: found {asked.stuck_after} (wanted: more than 0)")
    if Kind.CUT in kinds and (why := refusal()):
        raise UsageError(f"--kinds cut: {why} (wanted: a kernel that lends out descriptors)")
    if Kind.SHM in kinds:
        _require_small_shared_memory(asked.shm_limit)
    return Plan(asked.faults, asked.seed, tuple(map(Kind, kinds)), roles, asked.stuck_after)


def _require_small_shared_memory(limit_mb: int) -> None:
    """
    Raises:
        UsageError: what fills it could take memory that other programs need.
    """
    system = os.statvfs(SHARED_MEMORY)
    size, free = system.f_blocks * system.f_frsize // _MB, system.f_bavail * system.f_frsize // _MB
    if not 0 < size <= limit_mb:
        raise UsageError(
            f"--kinds shm: {SHARED_MEMORY} has {size} MB (wanted: at most the {limit_mb} of --shm-limit)"
        )
    if (left := psutil.virtual_memory().available // _MB) < 2 * free:
        raise UsageError(
            f"--kinds shm: the machine has {left} MB left (wanted: {2 * free}, twice what is filled)"
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _new_directory(place: str) -> Path:
    """
    Raises:
        UsageError: something is there, or it cannot be made.
    """
    directory = Path(place).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{place}: is not empty (wanted: a new directory)")
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror} (wanted: a new directory)") from error
    return directory


def _require_checkpoints(flags: Sequence[str]) -> None:
    """
    Raises:
        UsageError: there is no run, or one that could not go on.
    """
    given = {word.partition("=")[0] for word in expand(flags).words}
    if not given:
        raise UsageError("found no flags of a run (wanted: them behind --, as slime train takes them)")
    if "--save-interval" not in given:
        raise UsageError("--save-interval: not among the flags (wanted: it, to go on from checkpoints)")


def _run_twin(flags: Sequence[str], directory: Path, findings: Findings) -> str | None:
    """Returns why it failed."""
    print("twin: runs undisturbed", flush=True)
    twin = StartedRun([word for word in flags if word != "--supervise"], directory, {})
    try:
        status = twin.wait()
    finally:
        twin.end()
    findings.seconds["twin"] = time.monotonic() - twin.started
    return f"the undisturbed run ended with exit status {status}:\n{twin.tail()}" if status else None


def _disturb(flags: Sequence[str], directory: Path, plan: Plan, findings: Findings) -> None:
    mark = uuid.uuid4().hex
    started = StartedRun([*flags, "--supervise"], directory, {MARK: mark})
    processes = RunProcesses(started.pid, mark)
    disturbance = Disturbance(started, processes, plan, lambda line: print(line, flush=True))
    findings.outcomes = disturbance.outcomes
    try:
        status = disturbance.until_the_end()
    finally:
        started.end()
    findings.seconds["disturbed"] = time.monotonic() - started.started
    if status is None:
        findings.problems.append(_stuck(plan, disturbance.outcomes, started))
    elif status:
        findings.problems.append(f"the run ended with exit status {status} (wanted: 0): see {started.log}")
        print(started.tail(), file=sys.stderr)
    findings.problems += left_behind(processes)


def _stuck(plan: Plan, outcomes: Sequence[Outcome], run: StartedRun) -> str:
    fault = outcomes[-1] if outcomes else None
    after = f"{fault.kind} of {fault.role} at {fault.at_s:.1f} s" if fault else "the start"
    return f"no step within {plan.stuck_after_s:g} s after {after}: see {run.log}"


def left_behind(processes: RunProcesses) -> Iterator[str]:
    """Yields what lives after the run, and ends it; then the memory that the dead have left."""
    deadline = time.monotonic() + LEAVE_S
    while (left := processes.look_everywhere()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in sorted(left):
        yield f"process {pid} is left: {command_line(pid)[:100]}"
        try:
            psutil.Process(pid).kill()
        except psutil.Error:
            continue
    for path in sorted(Path(SHARED_MEMORY).glob("torch_*")):
        if path.name.split("_")[1] in map(str, processes.seen):
            yield f"shared memory is left: {path}"


def _compare(disturbed: Path, twin: Path | None, findings: Findings) -> None:
    try:
        found = read_metrics(disturbed / "metrics.jsonl")
        wanted = read_metrics(twin / "metrics.jsonl") if twin else None
    except (OSError, ValueError) as error:
        findings.problems.append(f"metrics cannot be read: {error}")
        return
    if missing := missing_steps(found["train"], wanted["train"] if wanted else None):
        findings.problems.append(f"optimizer steps without metrics: {', '.join(map(str, missing[:10]))}")
    if wanted is not None:
        findings.differences = list(differences(found, wanted))
        if count := len(findings.differences):
            findings.problems.append(f"{count} values of the metrics differ from the twin's")
