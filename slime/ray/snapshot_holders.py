"""The holders of snapshots on all nodes of the trainer, as the driver asks them."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.check.snapshots import bytes_on_a_host
from slime.ray.actor_classes import SnapshotHolder
from slime.ray.ending import CannotStart, cause
from slime.ray.node import process_env, runtime_env
from slime.ray.snapshot_place import label_on_host, run_of
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all

if TYPE_CHECKING:  # it imports much
    from slime.config.run import RunConfig
    from slime.ray.train_group import RayTrainGroup

_LOOK_INTERVAL = 0.5  # seconds
_AT_ONCE = 8  # calls of a holder but copies
_COPIES = "copies"
_COPIES_AT_ONCE = 4  # of a holder, in threads of their own: they wait for others, which read for them


class HolderFailed(ValueError):
    """A holder does not answer, or could not do what it was asked for."""


class Holders:
    """One on each node with ranks.

    Attributes:
        nodes: Ray's id of the node of each rank, by the name of its role.
        ring: these nodes, each once.
    """

    def __init__(self, config: "RunConfig", names: "Mapping[RayTrainGroup, str]") -> None:
        self._names, self._timeout = names, config.cluster.cluster_timeout
        flags = config.fault_tolerance
        self._parent, self._run = flags.trainer_snapshot_dir, run_of(flags.trainer_snapshots or "")
        self._wanted = _bytes_of_a_host(config)
        self._holders: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}
        self.nodes: dict[str, list[str]] = {}

    @property
    def ring(self) -> list[str]:
        return list(dict.fromkeys(node for nodes in self.nodes.values() for node in nodes))

    def start(self) -> None:
        """Starts them, before the first snapshot.

        Raises:
            CannotStart: there is no room on a node, or nothing can be written there.
        """
        try:
            refused = self._settle()
        except HolderFailed as error:
            raise CannotStart(f"--trainer-snapshot-interval: {error}") from error
        if refused:
            raise CannotStart(f"--trainer-snapshot-interval: {refused}")

    def settle(self) -> None:
        """Waits until all ranks have a node that lives, perhaps another one, and a holder on it.

        Raises:
            HolderFailed: that is not so within --cluster-timeout.
        """
        if refused := self._settle():
            raise HolderFailed(refused)

    def _settle(self) -> str | None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self.nodes = {name: group.processes.nodes() for group, name in self._names.items()}
                self._start_missing()
                return self._opened()
            except (HolderFailed, LookupError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise HolderFailed(f"no node for each rank in {self._timeout:.0f} s: {error}") from error
            self._forget_dead()
            time.sleep(_LOOK_INTERVAL)

    def _start_missing(self) -> None:
        for node in self.ring:
            if node not in self._holders:
                place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
                self._holders[node] = (
                    _actor_class()
                    .options(
                        num_cpus=0,
                        num_gpus=0,
                        max_concurrency=_AT_ONCE,
                        scheduling_strategy=place,
                        runtime_env=runtime_env(process_env()),
                    )
                    .remote()
                )

    def _opened(self) -> str | None:
        """Has them make their directories; returns why one has no room."""
        wanted = {node: (self._parent, label_on_host(self._run, node), self._wanted) for node in self.ring}
        refused = self.ask("making a directory of snapshots", "open", wanted)
        self._hosts |= self.ask("the name of the host", "host", dict.fromkeys(self.ring, ()))
        return next(filter(None, refused.values()), None)

    def _forget_dead(self) -> None:
        living = self.ask_living("host")
        for node, holder in list(self._holders.items()):
            if node not in living and _is_dead(holder):
                del self._holders[node]

    def host(self, node: str) -> str:
        """How messages name a node."""
        return f"{self._hosts.get(node, 'a lost host')} (node {node[:8]})"

    def ask(
        self, what: str, method: str, calls: Mapping[str, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[str, Any]:
        """What the holders of these nodes return to these arguments.

        Raises:
            HolderFailed: one failed, or did not answer.
        """
        return dict(zip(calls, self.wait(self.begin(method, calls), what, timeout), strict=True))

    def begin(self, method: str, calls: Mapping[str, tuple[Any, ...]]) -> list[ray.ObjectRef]:
        """The first half of `ask`."""
        if missing := [node for node in calls if node not in self._holders]:
            raise HolderFailed(f"there is no holder of snapshots on {self.host(missing[0])}")
        return [getattr(self._holders[node], method).remote(*arguments) for node, arguments in calls.items()]

    def wait(self, refs: list[ray.ObjectRef], what: str, timeout: float | None = None) -> list[Any]:
        """The second half of `ask`."""
        try:
            return wait_all(refs, what, timeout or self._timeout)
        except (ProcessDied, DeadlineExceeded, ray.exceptions.RayTaskError) as error:
            raise HolderFailed(cause(error)) from error

    def done(self, refs: list[ray.ObjectRef], timeout: float = 0) -> bool:
        """Whether calls have ended, however they did, in so many seconds."""
        return not refs or len(ray.wait(refs, num_returns=len(refs), timeout=timeout)[0]) == len(refs)

    def ask_living(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What all of them answer; those that are lost do not."""
        asked = {node: getattr(holder, method).remote(*arguments) for node, holder in self._holders.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=self._timeout)
        answers = {}
        for node, ref in asked.items():
            with suppress(ray.exceptions.RayError):
                answers[node] = ray.get(ref, timeout=0)
        return answers

    def handle(self, node: str) -> Any:
        """The holder of a node, for another one."""
        return self._holders[node]

    def next_of(self, node: str) -> str | None:
        """The node that keeps copies of this one's parts; None where there is no other."""
        ring = self.ring
        following = ring[(ring.index(node) + 1) % len(ring)]
        return None if following == node else following

    def ranks_on(self, name: str, nodes: Iterable[str]) -> list[int]:
        there = {*nodes}
        return [rank for rank, node in enumerate(self.nodes[name]) if node in there]


def _actor_class() -> Any:
    """Copies that wait for each other's holders never take the threads which would answer them."""
    ray.method(concurrency_group=_COPIES)(vars(SnapshotHolder)["copy_parts"])
    return ray.remote(concurrency_groups={_COPIES: _COPIES_AT_ONCE})(SnapshotHolder)


def _is_dead(holder: Any) -> bool:
    """Whether Ray says that it does not come back, unlike one that it cannot reach at present."""
    try:
        ray.get(holder.host.remote(), timeout=_LOOK_INTERVAL)
    except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnschedulableError):
        return True
    except ray.exceptions.RayError:
        return False
    return False


def _bytes_of_a_host(config: "RunConfig") -> int:
    from slime.check.needs import trained_roles
    from slime.ray.policies import policy_configs

    return bytes_on_a_host([role for own in policy_configs(config).values() for role in trained_roles(own)])
