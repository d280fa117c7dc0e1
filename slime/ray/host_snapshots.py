"""Snapshots of which each host of the trainer keeps the part of its own ranks, and a copy of another's.

Ranks write into the memory of their hosts. When all have, each node's holder gets the parts of the node
before it, while training goes on. Ranks that are built again find the whole iteration on each host, which
its holder gets from those that still have it.
"""

import logging
from collections import defaultdict
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from slime.ray.ending import CannotStart
from slime.ray.snapshot_holders import HolderFailed, Holders

if TYPE_CHECKING:  # it imports much
    from slime.config.run import RunConfig
    from slime.ray.train_group import RayTrainGroup

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # at bringing parts, of which each that fails has lost a holder


class OnHosts:
    """A `slime.ray.snapshot_store.SnapshotStore`.

    Args:
        names: of the directory of each role.

    Raises:
        CannotStart: a host cannot keep them.
    """

    def __init__(self, config: "RunConfig", names: "Mapping[RayTrainGroup, str]") -> None:
        flags = config.fault_tolerance
        self._place, self._copies = flags.trainer_snapshots, flags.trainer_snapshot_copies
        self._checksums = config.checkpoints.verify_checkpoint == "checksums"
        self._timeout = config.cluster.train_timeout
        self._by_group, self._names = names, [*names.values()]
        self._holders = Holders(config, names)
        self._whole: dict[str, set[int]] = {name: set() for name in self._names}
        self._copied: dict[str, set[int]] = {name: set() for name in self._names}
        self._copying: dict[tuple[str, int], list[Any]] = {}
        self._told = False
        self._holders.start()
        if self._copies and len(self._holders.ring) == 1:
            raise CannotStart(
                f"--trainer-snapshot-copies {self._copies}: Ray has put all ranks of the trainer on one node "
                "(wanted: nodes with --actor-num-gpus-per-node GPUs, or 0)"
            )

    def make_room(self) -> str | None:
        """Keeps the newest one that a lost node leaves whole, or else the newest."""
        try:
            if not self._have_copied():
                return "copies of the last snapshot are still on their way to other nodes"
            newest = max(_of_all(self._copied) or _of_all(self._whole), default=None)
            self._whole = {name: self._whole[name] & {newest} for name in self._names}
            self._copied = {name: self._copied[name] & {newest} for name in self._names}
            ring = self._holders.ring
            self._holders.ask("room for a snapshot", "keep", dict.fromkeys(ring, (self._names, newest)))
            room = self._holders.ask("room for a snapshot", "lacks_room", dict.fromkeys(ring, (self._names,)))
            return next(filter(None, room.values()), None)
        except HolderFailed as error:
            return str(error)

    def write(self, group: "RayTrainGroup", iteration: int) -> list[str]:
        name = self._by_group[group]
        asked = dict.fromkeys(self._holders.nodes[name], (name, iteration))
        try:
            self._holders.ask("a directory for a snapshot", "prepare", asked)
            reasons = [*filter(None, group.try_to_save(iteration, True, f"{self._place}/{name}"))]
            if reasons:
                return reasons
            self._holders.ask("putting a snapshot in place", "publish", asked)
            self._whole[name].add(iteration)
            self._begin_copies(name, iteration)
        except HolderFailed as error:
            return [str(error)]
        return []

    def _begin_copies(self, name: str, iteration: int) -> None:
        holders, calls = self._holders, {}
        for node in dict.fromkeys(holders.nodes[name]) if self._copies else ():
            following, ranks = holders.next_of(node), holders.ranks_on(name, [node])
            if following is None:
                self._tell_copies("all ranks are on one node")
                break
            calls[following] = name, iteration, holders.handle(node), ranks, self._checksums
        self._copying[name, iteration] = holders.begin("copy_parts", calls)

    def _have_copied(self) -> bool:
        """Whether no copy is under way. One that has failed is told of."""
        for (name, iteration), refs in list(self._copying.items()):
            if not self._holders.done(refs):
                return False
            del self._copying[name, iteration]
            try:
                self._holders.wait(refs, f"copies of iteration {iteration} of {name}")
            except HolderFailed as error:
                self._tell_copies(str(error))
                continue
            self._copied[name].add(iteration)
            self._told &= not refs
        return True

    def _tell_copies(self, reason: str) -> None:
        """Says it once until a copy has succeeded."""
        if not self._told:
            logger.warning("a snapshot has no copies, and is lost with a node: %s", reason)
        self._told = True

    def kept(self) -> set[int]:
        return set().union(*self._whole.values())

    def newest(self, among: Container[int]) -> int | None:
        return max((number for number in self._there() if number in among), default=None)

    def _there(self) -> "dict[int, dict[str, dict[int, list[str]]]]":
        """The nodes that have each part, by iteration, role and rank; of iterations that are whole."""
        found: dict[int, dict[str, dict[int, list[str]]]] = defaultdict(lambda: defaultdict(dict))
        for node, of_roles in self._holders.ask_living("parts", self._names, self._checksums).items():
            for name, of_iterations in of_roles.items():
                for iteration, ranks in of_iterations.items():
                    for rank in ranks:
                        found[iteration][name].setdefault(rank, []).append(node)
        wanted = {name: {*range(len(nodes))} for name, nodes in self._holders.nodes.items()}
        return {
            iteration: roles
            for iteration, roles in found.items()
            if all(wanted[name] <= roles[name].keys() for name in self._names)
        }

    def bring(self, iteration: int) -> None:
        """Gets the parts that a node with ranks lacks, to each such node, from those that have them.

        Where a node is lost meanwhile, it begins again as long as others have its parts.

        Raises:
            HolderFailed: not all can be had.
        """
        for left in reversed(range(_ATTEMPTS)):
            self._holders.settle()
            self._end_copies()
            try:
                self._bring(iteration)
            except HolderFailed as error:
                if not left or iteration not in self._there():
                    raise
                logger.warning("the parts of iteration %d are asked for again: %s", iteration, error)
            else:
                return

    def _bring(self, iteration: int) -> None:
        holders = self._holders
        holders.ask_living("keep", self._names, iteration)
        there = self._there().get(iteration)
        if there is None:
            raise HolderFailed(f"the snapshot of iteration {iteration} is not whole any more")
        for name, nodes in holders.nodes.items():
            refs = self._copying[name, iteration] = []
            for node in dict.fromkeys(nodes):
                for source, ranks in _sources(node, there[name]).items():
                    self._tell_source(iteration, name, node, source, ranks)
                    call = name, iteration, holders.handle(source), ranks, self._checksums
                    refs += holders.begin("copy_parts", {node: call})
        under_way = [ref for refs in self._copying.values() for ref in refs]
        holders.wait(under_way, f"bringing the snapshot of iteration {iteration} to its ranks", self._timeout)
        self._copying = {}
        for name, nodes in holders.nodes.items():
            holders.ask("choosing a snapshot", "mark", dict.fromkeys(nodes, (name, iteration)))

    def _tell_source(self, iteration: int, name: str, node: str, source: str, ranks: list[int]) -> None:
        told = "iteration %d of %s: %s has the part of rank(s) %s from the memory of %s"
        of_ranks = ", ".join(map(str, ranks))
        logger.warning(told, iteration, name, self._holders.host(node), of_ranks, self._holders.host(source))

    def _end_copies(self) -> None:
        """Lets those that are under way end: steps that are taken again write the same names."""
        refs = [ref for under_way in self._copying.values() for ref in under_way]
        self._holders.done(refs, self._timeout)
        self._copying = {}

    def go_back(self, iteration: int) -> None:
        """Leaves each host the parts of its ranks and those that it copies."""
        self._end_copies()
        self._holders.ask_living("forget_after", self._names, iteration)  # whatever fails after it
        try:
            self._holders.settle()
            for name in self._names:
                self._trim(name, iteration)
        except HolderFailed as error:
            self._tell_copies(str(error))
        self._learn()

    def _trim(self, name: str, iteration: int) -> None:
        holders, ring = self._holders, self._holders.ring
        for node in ring:
            before = [other for other in ring if self._copies and holders.next_of(other) == node]
            kept = name, iteration, holders.ranks_on(name, [node, *before])
            holders.ask("parts of a snapshot", "keep_parts", {node: kept})

    def _learn(self) -> None:
        """Which snapshots are whole, and which of them would still be with any node lost."""
        there, spread = self._there(), 1 + bool(self._copies)
        for name in self._names:
            self._whole[name] = {*there}
            self._copied[name] = {
                number
                for number, roles in there.items()
                if all(len(nodes) >= spread for nodes in roles[name].values())
            }

    def discard(self) -> None:
        self._end_copies()
        self._holders.ask_living("keep", self._names, None)
        self._whole = {name: set() for name in self._names}
        self._copied = {name: set() for name in self._names}


def _sources(node: str, holders: Mapping[int, list[str]]) -> dict[str, list[int]]:
    """From which nodes this one gets the parts that it lacks, and which from each."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, nodes in sorted(holders.items()):
        if node not in nodes:
            found[nodes[rank % len(nodes)]].append(rank)
    return dict(found)


def _of_all(by_role: Mapping[str, set[int]]) -> set[Any]:
    return set.intersection(*by_role.values())
