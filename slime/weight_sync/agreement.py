"""Steps that all trainer ranks take together, and that fail together."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast
from urllib.parse import urlsplit

import torch.distributed as dist

from slime.config.cluster import ClusterConfig
from slime.config.weight_update import WeightUpdateConfig
from slime.utils.addresses import get_host_info, is_loopback
from slime.weight_sync.broken import of_broken_group

T = TypeVar("T")
_BEFORE_OTHERS = 0.75


def wait_limit(config: ClusterConfig) -> timedelta:
    """How long a rank waits for others: ``--distributed-timeout-minutes``."""
    return timedelta(minutes=config.distributed_timeout_minutes)


def answer_limit(config: WeightUpdateConfig, loads_all: bool = False) -> float:
    """Seconds that an engine may take over one request of an update.

    Where engines are replaced one that hangs has to be given up before the other ranks give up the one that
    asks it: they could not begin again.

    Args:
        loads_all: whether the engine loads a whole checkpoint within a request.
    """
    limit, faults = wait_limit(config.cluster).total_seconds(), config.fault_tolerance
    if not faults.use_fault_tolerance:
        return limit
    earlier = _BEFORE_OTHERS * limit
    return earlier if loads_all else min(earlier, faults.rollout_engine_hang_timeout)


def peer_limit(config: WeightUpdateConfig) -> timedelta:
    """How long a rank waits for engines that others speak to, who give them up no later than that."""
    first = min(_BEFORE_OTHERS * wait_limit(config.cluster).total_seconds(), answer_limit(config))
    return timedelta(seconds=first)


def group_address(urls: Iterable[str] = ()) -> str:
    """The address of rank 0's host: where the trainer itself met, unless engines elsewhere cannot reach that.

    Args:
        urls: of the engines that are to meet it there.
    """
    met = os.environ["MASTER_ADDR"]
    elsewhere = any(not is_loopback(urlsplit(url).hostname or "") for url in urls)
    return get_host_info()[1] if elsewhere and is_loopback(met) else met


class RankAgreement:
    """A gloo group of all trainer ranks on which the outcome of each step is exchanged.

    ``with agreement.step("pause engines"): ...`` is a barrier at its end. If the body raised on any rank,
    the step raises on all of them, so that none waits for a peer that has given up.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """
        Raises:
            RuntimeError: the body failed on another rank, or connections between ranks have ended.
            TimeoutError: another rank did not reach the end of the step in time.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        own = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self._exchange(name, own, failure) if dist.get_world_size() > 1 else []
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise RuntimeError(f"weight sync, step {name!r}: rank {rank} failed: {outcome}")

    def on_first(self, name: str, work: Callable[[], T]) -> T:
        """A step of rank 0 alone; returns what it has made on every rank.

        Raises:
            RuntimeError: it failed there.
            TimeoutError: another rank did not reach it in time.
        """
        made: T | None = None
        with self.step(name):
            if dist.get_rank() == 0:
                made = work()
        return cast(T, self.of_first(name, made))

    def of_first(self, name: str, value: T) -> T:
        """What rank 0 has, on every rank.

        Raises:
            TimeoutError: another rank did not say in time.
        """
        return self.of_all(name, value)[0]

    def of_all(self, name: str, value: T) -> list[T]:
        """What each rank has, on every rank.

        Raises:
            TimeoutError: another rank did not say in time.
        """
        return [value] if dist.get_world_size() == 1 else cast("list[T]", self._exchange(name, value))

    def any_rank(self, name: str, own: bool) -> bool:
        """Whether it is so on one of the ranks.

        Raises:
            TimeoutError: another rank did not say in time.
        """
        return any(self.of_all(name, own))

    def _exchange(self, name: str, own: object, failure: BaseException | None = None) -> list[object]:
        outcomes: list[object] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(outcomes, own, group=self._group)
        except RuntimeError as error:
            # By the kind it is known whether ranks that start again could go on.
            kind = RuntimeError if of_broken_group(error) else TimeoutError
            raise kind(
                f"weight sync, step {name!r}: rank {dist.get_rank()} waited for the other trainer ranks, "
                f"at most {self._timeout.total_seconds():.0f} s ({error})"
            ) from (failure or error)
        return outcomes
