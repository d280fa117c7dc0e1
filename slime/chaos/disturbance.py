"""Faults strike processes of a run, and what becomes of each is noted."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slime.chaos.faults import DEFAULT_KINDS, LASTS_S, Kind, strike
from slime.chaos.supervised import StartedRun
from slime.chaos.victims import DRIVER, RunProcesses

LOOK_S = 0.2
UNDONE_WITHIN_S = 2.0
"""Seconds in which a fault is undone whose time is over."""
LONGEST_DELAY_S = 20.0
"""Seconds in which a fault strikes that does not wait until the run has got on."""
FIRST_STEP_S = 5.0
"""Within this, or the time of the shortest step if that is less, strikes one that does."""
ENDS_THE_RUN = DRIVER, Kind.TERM
"""By this whoever has started a run ends it, for good."""
MACHINE = "machine"
"""Whom a fault strikes that strikes no process."""
_WHILE_IT_RECOVERS = 0.2
"""How often the next fault does not wait until the run has got on."""


@dataclass(frozen=True)
class Plan:
    """What is to be done to a run.

    Attributes:
        faults: how many.
        seed: of kinds, victims and moments; when a moment comes, and who lives then, no seed decides.
        roles: who may be struck; empty for everybody.
        stuck_after_s: seconds without a step and without a fault after which the run is taken to be stuck.
    """

    faults: int = 5
    seed: int = 0
    kinds: tuple[Kind, ...] = DEFAULT_KINDS
    roles: tuple[str, ...] = ()
    stuck_after_s: float = 600.0


@dataclass
class Outcome:
    """A fault, and what became of it.

    Attributes:
        at_s: seconds since the start of the run.
        steps: rows of optimizer steps that it had written until then.
        restarts: how often the run was started again because of it, or of one that struck meanwhile.
        recovered_s: seconds until the next optimizer step, or the end of the run; None if there was none.
    """

    kind: Kind
    role: str
    pid: int
    at_s: float
    steps: int
    restarts: int = 0
    recovered_s: float | None = None


class Disturbance:
    """Strikes processes of a run one after the other, each after the run has got on since the last one.

    Now and then it does not wait for that, so that starts and recoveries are struck too.
    """

    def __init__(
        self, run: StartedRun, processes: RunProcesses, plan: Plan, tell: Callable[[str], None]
    ) -> None:
        """
        Args:
            tell: takes a line for people about each fault.
        """
        self._run, self._processes, self._plan, self._tell = run, processes, plan, tell
        self._random = random.Random(plan.seed)
        self._steps, self._got_on_at, self._step_s = 0, time.monotonic(), FIRST_STEP_S
        self.outcomes: list[Outcome] = []
        self._restarts_before: list[int] = []  # each outcome
        self._lasts = 0, 0.0  # the victim of a fault that is undone, and when it is

    def until_the_end(self) -> int | None:
        """Returns the run's exit status; None if it does not get on, and so has to be ended."""
        for _ in range(self._plan.faults):
            if not self._wait_for_the_moment() or not self._strike_somebody():
                break
        while self._run.status is None and not self._is_stuck():
            self._look()
        status = self._run.status
        self._note_progress()
        return status

    def _wait_for_the_moment(self) -> bool:
        """Returns whether the run is still there."""
        hurry = self._random.random() < _WHILE_IT_RECOVERS
        delay = self._random.random()
        if hurry:
            return self._wait(lambda began: time.monotonic() - began > delay * LONGEST_DELAY_S)
        steps = self._run.steps()
        return self._wait(lambda began: self._run.steps() > steps) and self._wait(
            lambda began: time.monotonic() - began > delay * self._step_s
        )

    def _wait(self, is_over: Callable[[float], bool]) -> bool:
        began = time.monotonic()
        while self._run.status is None and not self._is_stuck():
            if is_over(began):
                return True
            self._look()
        return False

    def _look(self) -> None:
        time.sleep(LOOK_S)
        self._processes.look()
        self._note_progress()

    def _strike_somebody(self) -> bool:
        """Returns whether somebody was there, before the run was over."""
        kind = self._random.choice(self._plan.kinds)
        where = self._random.random(), self._random.random()
        while self._run.status is None and not self._is_stuck():
            for role, pid in _chosen(self._allowed(kind), *where):
                before = self._run.restarts()
                if strike(kind, pid):
                    at = time.monotonic() - self._run.started
                    self._restarts_before.append(before)
                    if kind in LASTS_S and kind is not Kind.PAUSE:
                        self._lasts = pid, time.monotonic() + LASTS_S[kind] + UNDONE_WITHIN_S
                    self.outcomes.append(Outcome(kind, role, pid, at, self._run.steps()))
                    self._tell(f"{at:7.1f} s  {kind} {role} (process {pid})")
                    return True
            self._look()
        return False

    def _allowed(self, kind: Kind) -> dict[str, list[int]]:
        """Returns those of whom one may be struck now.

        While a fault lasts, nothing else befalls its victim, and no other begins that is undone: that would
        find what is not to stay.
        """
        suffers, until = self._lasts
        lasts = time.monotonic() < until
        if lasts and kind in LASTS_S and kind is not Kind.PAUSE:
            return {}
        if kind is Kind.SHM:
            return {MACHINE: [self._run.pid]}
        allowed = {
            role: [pid for pid in pids if not lasts or pid != suffers]
            for role, pids in self._processes.roles().items()
            if (not self._plan.roles or role in self._plan.roles) and (role, kind) != ENDS_THE_RUN
        }
        return {role: pids for role, pids in allowed.items() if pids}

    def _note_progress(self) -> None:
        """Completes the faults after which the run has got on by now."""
        ended_well = self._run.status == 0
        for outcome, before in zip(self.outcomes, self._restarts_before, strict=True):
            if outcome.recovered_s is None and (ended_well or self._run.steps() > outcome.steps):
                outcome.recovered_s = time.monotonic() - self._run.started - outcome.at_s
                outcome.restarts = self._run.restarts() - before
                healed = "started again" if outcome.restarts else "went on"
                self._tell(f"          {outcome.role}: {healed}, next step after {outcome.recovered_s:.1f} s")

    def _is_stuck(self) -> bool:
        """Whether nothing has happened for too long: no step, no fault."""
        now = time.monotonic()
        if (steps := self._run.steps()) != self._steps:
            if self._steps:  # else most of it was the start
                self._step_s = min(self._step_s, now - self._got_on_at)
            self._steps, self._got_on_at = steps, now
        struck = self._run.started + self.outcomes[-1].at_s if self.outcomes else self._run.started
        return now - max(self._got_on_at, struck) > self._plan.stuck_after_s


def _chosen(roles: dict[str, list[int]], where: float, which: float) -> Iterator[tuple[str, int]]:
    """Yields one of those of one role: roles are alike likely, however many play one."""
    if names := sorted(roles):
        role = names[int(where * len(names))]
        yield role, roles[role][int(which * len(roles[role]))]
