"""Actors of a run that somebody has stopped (SIGSTOP): Ray takes them for busy, and waits.

watch = ProcessWatch()
watch.add("rank 0", actor)      # an actor with the method `process_location`
watch.check()                   # every few seconds, while the actor is waited for
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.processes.stacks import stacks
from slime.processes.stopped import STOPPED_LIMIT_S, StopClock, is_running, is_stopped
from slime.utils.deadlines import within

logger = logging.getLogger(__name__)

_STACKS_TIMEOUT = 60.0  # seconds
_LOOK_TIMEOUT = 5.0  # seconds that a look waits for other nodes
_GONE_INTERVAL = 0.05  # seconds

ProcessLocation = tuple[str, int]
"""Ray's id of a node, and a process id."""


class ProcessStopped(RuntimeError):
    """A process of the run is stopped and will not answer."""


def process_location() -> ProcessLocation:
    """Returns the node and process id of this process."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


class ProcessWatch:
    """Looks at actors' processes on their nodes."""

    def __init__(self, limit: float = STOPPED_LIMIT_S) -> None:
        self._limit = limit
        self._unknown: dict[ray.ObjectRef, tuple[str, str]] = {}  # name, and Ray's id of the actor
        self._names: dict[str, dict[int, str]] = defaultdict(dict)
        self._clocks: dict[str, StopClock] = defaultdict(StopClock)
        self._asked: dict[str, ray.ObjectRef] = {}

    def add(self, name: str, actor: Any) -> None:
        """Adds an actor to those that are looked at; its next call waits for none of ours."""
        self._unknown[actor.process_location.remote()] = name, actor._actor_id.hex()

    def add_process(self, name: str, location: ProcessLocation) -> None:
        """Adds a process that is no actor's."""
        node, pid = location
        self._names[node][pid] = name

    def check(self) -> None:
        """
        Raises:
            ProcessStopped: names an actor that was stopped at every look of the last seconds.
        """
        self._learn()
        for node, stopped in self._look().items():
            for pid, seconds in self._clocks[node].overdue(stopped, self._limit).items():
                raise ProcessStopped(
                    f"{self._names[node][pid]} (process {pid}) is stopped (SIGSTOP), for {seconds:.0f} s now"
                )

    def wait_until_gone(self, timeout: float) -> None:
        """Waits until the processes, which were killed, no longer hold memory; what a lost node held is gone.

        Raises:
            ProcessStopped: names one that is still there.
        """
        self._learn()
        asked = {node: _ask(_left_there, node, list(names), timeout) for node, names in self._names.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout + _LOOK_TIMEOUT)
        for node, ref in asked.items():
            with suppress(ray.exceptions.RayError):
                for pid in ray.get(ref, timeout=0):
                    raise ProcessStopped(
                        f"{self._names[node][pid]} (process {pid}) was killed and is still there after "
                        f"{timeout:.0f} s"
                    )

    def show_stacks(self) -> None:
        """Logs what each process is in, for a wait that has run past its deadline."""
        self._learn()
        asked = {node: _ask(_stacks_there, node, list(names)) for node, names in self._names.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STACKS_TIMEOUT)
        for node, ref in asked.items():
            with suppress(ray.exceptions.RayError):
                for pid, found in ray.get(ref, timeout=0).items():
                    logger.error("%s (process %d) is in:\n%s", self._names[node][pid], pid, found)

    def _learn(self) -> None:
        """One that starts answers later, or never if it is stopped: then Ray's table of actors has its place.

        What stays unknown has no process yet, or has ended: that is found elsewhere.
        """
        if not self._unknown:
            return
        known, _ = ray.wait(list(self._unknown), num_returns=len(self._unknown), timeout=0)
        for ref in known:
            name, _ = self._unknown.pop(ref)
            try:
                node, pid = ray.get(ref)
            except ray.exceptions.RayError:
                continue
            self._names[node][pid] = name
        for ref, (name, actor) in list(self._unknown.items()):
            if place := _place_in_table(actor):
                del self._unknown[ref]
                node, pid = place
                self._names[node][pid] = name

    def _look(self) -> dict[str, list[int]]:
        """Stopped processes by node; a node that does not answer is left to Ray."""
        here = ray.get_runtime_context().get_node_id()
        found = {here: _stopped(self._names[here])} if here in self._names else {}
        fresh = {
            node: _ask(_stopped_there, node, list(names))
            for node, names in self._names.items()
            if node != here and node not in self._asked
        }
        self._asked |= fresh
        # Who did not answer the last time is not waited for again.
        if fresh:
            ray.wait(list(fresh.values()), num_returns=len(fresh), timeout=_LOOK_TIMEOUT)
        return found | self._answers()

    def _answers(self) -> dict[str, list[int]]:
        """What nodes have answered by now."""
        answers = {}
        for node, ref in list(self._asked.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            del self._asked[node]
            with suppress(ray.exceptions.RayError):  # the node is gone, or out of memory
                answers[node] = ray.get(ref)
        return answers


def _place_in_table(actor: str) -> ProcessLocation | None:
    """Where Ray has started the process of an actor; None if it has not, or does not say."""
    try:
        found = within(_LOOK_TIMEOUT, "Ray's table of actors", lambda: ray._private.state.actors(actor))
    except TimeoutError:
        return None
    pid, node = found.get("Pid"), found.get("Address", {}).get("NodeID")
    return (node, pid) if pid and node else None


def _stopped(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if is_stopped(pid)]


def _left(pids: Iterable[int], timeout: float) -> list[int]:
    """Returns those that are there at the end of so many seconds, or as soon as there is none."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_GONE_INTERVAL)
    return left


def _stacks(pids: Iterable[int]) -> dict[int, str]:
    return {pid: stacks(pid) for pid in pids}


_stacks_there = ray.remote(num_cpus=0)(_stacks)
_stopped_there, _left_there = ray.remote(num_cpus=0)(_stopped), ray.remote(num_cpus=0)(_left)


def _ask(function: Any, node: str, *arguments: Any) -> ray.ObjectRef:
    """Calls a remote function on a node."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return function.options(scheduling_strategy=place).remote(*arguments)
