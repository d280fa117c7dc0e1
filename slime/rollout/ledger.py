"""The books on groups of samples: issued = trained + filtered + dropped + buffered + leased.

A data source owns a ``Ledger`` and saves it with its state. A rollout function opens a ``RolloutAccount`` on
the data source, and each group has one life::

    account = RolloutAccount(data_source)   # for a rollout, or for a worker that outlives rollouts
    for group in account.take(8):           # leased
        ...
        account.train(group)                # or filter(group), drop(group, "too_old"), give_back([group])
    metrics |= account.metrics()            # rollout/dropped/<reason>
    account.close()                         # raises if a lease has not ended

``group`` is the very list that ``take`` returned, whatever generation has made of its samples. An account may
be used by another thread than the one that saves the data source.

What is leased when the state is saved is saved as it was when it was given out, or as ``restate`` has said
since. After a restart it comes first, in the order in which it had been given out. Code that calls
``data_source.get_samples`` itself has no account: the groups that it holds are counted as leased until
somebody hands them back, and don't come back.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from threading import RLock
from typing import Any

from slime.rollout.base_types import RolloutError
from slime.rollout.copies import copied

# Why groups are dropped.
ABORTED = "aborted"  # unfinished when the batch was full
BUFFER_FILTER = "buffer_filter"  # taken out of the buffer and not chosen
HOOK = "hook"  # taken by user code, which decides on their fate
NO_STEP = "no_step"  # fill no optimizer step
SPLIT = "split"  # unfinished, with samples that were split
SURPLUS = "surplus"  # finished when the batch was full


class LedgerError(RolloutError):
    """Groups were lost, appeared from nowhere or got a second fate."""


@dataclass
class Ledger:
    """Groups since the start of the run.

    Attributes:
        dropped: groups by reason.
        buffered: groups that wait in the data source.
        leased: groups that are out.
        records: of the leases of accounts, in the order of their numbers, the group as it would be saved.
        lock: held while groups move, so that a state that is saved meanwhile has each of them once.
    """

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    buffered: int = 0
    leased: int = 0
    records: dict[int, list[Any]] = field(default_factory=dict, compare=False, repr=False)
    lock: Any = field(default_factory=RLock, compare=False, repr=False)
    _numbers: int = field(default=0, compare=False, repr=False)

    @property
    def balanced(self) -> bool:
        """Whether every group that was issued has exactly one place."""
        return self.unbalanced == 0

    @property
    def unbalanced(self) -> int:
        """Counts the groups without exactly one place."""
        with self.lock:
            places = self.trained + self.filtered + self.dropped.total() + self.buffered + self.leased
            too_few = max(0, -self.buffered) + max(0, len(self.records) - self.leased)
            return abs(self.issued - places) + too_few

    def accounts(self) -> dict[str, int]:
        """Returns the groups of each account, and ``unbalanced``."""
        with self.lock:
            counts = self.to_dict() | {"dropped": self.dropped.total(), "unbalanced": self.unbalanced}
        return counts

    def issue(self, groups: int) -> None:
        """Groups are given out for the first time."""
        self.issued += groups
        self.leased += groups

    def fetch(self, groups: int) -> None:
        """Groups that waited are given out again."""
        self.buffered -= groups
        self.leased += groups

    def put_back(self, groups: int) -> None:
        """Groups come to wait. Those beyond what is out, and on no record, are of somebody's own making."""
        self.issue(max(0, groups - (self.leased - len(self.records))))
        self.leased -= groups
        self.buffered += groups

    def drop_buffered(self, groups: int, reason: str) -> None:
        self.buffered -= groups
        if groups:
            self.dropped[reason] += groups

    def drop_trained(self, groups: int, reason: str = NO_STEP) -> None:
        """Groups that were to be trained, and are not."""
        with self.lock:
            groups = min(groups, self.trained)  # a rollout function of the user's may have booked none
            self.trained -= groups
            self.dropped[reason] += groups

    def record(self, group: list[Any]) -> int:
        """Keep a leased group as it is now; returns the number of the lease."""
        self._numbers += 1
        self.records[self._numbers] = copied(group)
        return self._numbers

    def to_dict(self) -> dict[str, Any]:
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return counts | {"dropped": dict(self.dropped)}

    @staticmethod
    def from_dict(state: dict[str, Any], buffered: int) -> "Ledger":
        """The books on a restart, when groups wait in the data source and none is out.

        States of before there were leases have one number of dropped groups, and no others than the fates.
        """
        counts = {key: value for key, value in state.items() if key != "dropped"}
        dropped = state["dropped"]
        dropped = Counter(dropped if isinstance(dropped, dict) else {"unknown": dropped} if dropped else {})
        ledger = Ledger(**counts | {"dropped": dropped, "buffered": buffered})
        ledger.leased = ledger.issued - ledger.trained - ledger.filtered - dropped.total() - buffered
        return ledger


class RolloutAccount:
    """The leases of one rollout, or of a worker that outlives rollouts.

    Any data source will do; one without a ledger gets books of its own, which nobody saves. A user's subclass
    may move groups in ways that the ledger does not see: a group that is handed back and shows in no buffer
    leaves the books until it is given out again. What a class itself, not one that it inherits from, promises
    with ``keeps_books`` is held against its ``get_buffer_length``.
    """

    def __init__(self, data_source: Any) -> None:
        self._source = data_source
        ledger = getattr(data_source, "ledger", None)
        self._ledger = ledger if isinstance(ledger, Ledger) else Ledger()
        self._open: dict[int, tuple[list[Any], int]] = {}  # by identity; the reference keeps it unique
        with self._ledger.lock:
            self._reported = Counter(self._ledger.dropped)
            self._vanished = self._count_vanished()

    @property
    def keeps_finished(self) -> bool:
        """Whether the data source says that it keeps finished groups that are handed back, and saves them."""
        return getattr(self._source, "keeps_finished", False)

    def __len__(self) -> int:
        """Groups that are leased to this account."""
        return len(self._open)

    def take(self, num_groups: int) -> list[Any]:
        """Lease groups.

        Raises:
            RolloutError: the data source returned none, so waiting for more is in vain; or what is no group.
        """
        with self._ledger.lock:
            before = self._ledger.leased
            groups = self._source.get_samples(num_groups)
            if not groups:
                raise RolloutError(
                    f"{type(self._source).__name__}.get_samples({num_groups}) returned no group"
                )
            if wrong := [group for group in groups if not isinstance(group, list) or not group]:
                raise RolloutError(
                    f"{type(self._source).__name__}.get_samples({num_groups}) returned {wrong[0]!r:.100} "
                    "among its groups, expected lists of samples"
                )
            self._ledger.issue(max(0, len(groups) - (self._ledger.leased - before)))
            for group in groups:
                if id(group) in self._open:
                    raise LedgerError(f"{_name(group)} was given out twice")
                self._open[id(group)] = group, self._ledger.record(group)
        return groups

    def take_for_hook(self, num_groups: int) -> list[Any]:
        """Fetch groups for user code, which decides on their fate by itself."""
        groups = self.take(num_groups)
        for group in groups:
            self.drop(group, HOOK)
        return groups

    def restate(self, group: list[Any], state: list[Any]) -> None:
        """Restates a group: from now on a state that is saved holds the group like this, so nobody may change
        ``state`` now.
        """
        with self._ledger.lock:
            self._ledger.records[self._number(group)] = state

    def train(self, group: list[Any]) -> None:
        """The group goes into a batch."""
        with self._ledger.lock:
            self._end(group)
            self._ledger.trained += 1

    def filter(self, group: list[Any]) -> None:
        """A filter found the finished group useless."""
        with self._ledger.lock:
            self._end(group)
            self._ledger.filtered += 1

    def drop(self, group: list[Any], reason: str) -> None:
        """The group is lost, and the metric ``rollout/dropped/<reason>`` says so."""
        with self._ledger.lock:
            self._end(group)
            self._ledger.dropped[reason] += 1

    def give_back(self, groups: list[Any], taken: list[Any] | None = None) -> None:
        """Hand groups back for a later rollout.

        Args:
            groups: in the state in which they are to be given out again.
            taken: the same ones as ``take`` returned them, if those are other lists.
        """
        with self._ledger.lock:
            for group in groups if taken is None else taken:
                self._strike(group)
            before = self._ledger.buffered
            self._source.add_samples(groups)
            unseen = len(groups) - (self._ledger.buffered - before)
            self._ledger.leased -= unseen
            self._ledger.issued -= unseen

    def metrics(self) -> dict[str, int]:
        """``rollout/dropped/<reason>`` since the last call, but for ``no_step``, which is found later."""
        with self._ledger.lock:
            new = self._ledger.dropped - self._reported
            self._reported = Counter(self._ledger.dropped)
        return {f"rollout/dropped/{why}": count for why, count in sorted(new.items()) if why != NO_STEP}

    def close(self) -> None:
        """Look whether all leases have ended.

        Raises:
            LedgerError: one has not, or the data source has lost groups that waited.
        """
        if self._open:
            names = ", ".join(_name(group) for group, _ in list(self._open.values())[:8])
            raise LedgerError(f"{len(self._open)} groups were taken and got no fate: {names}")
        with self._ledger.lock:
            if self._promised and not self._ledger.balanced:
                raise LedgerError(f"the books do not balance: {self._ledger}")
            if self._count_vanished() != self._vanished:
                raise LedgerError(
                    f"{self._ledger.buffered} groups should wait in the data source, but get_buffer_length() "
                    f"is {self._source.get_buffer_length()}"
                )

    def _end(self, group: list[Any]) -> None:
        self._strike(group)
        self._ledger.leased -= 1

    def _strike(self, group: list[Any]) -> None:
        del self._ledger.records[self._number(group)]
        del self._open[id(group)]

    def _number(self, group: list[Any]) -> int:
        if id(group) not in self._open:
            raise LedgerError(f"{_name(group)} is not leased here: it has its fate already, or was not taken")
        return self._open[id(group)][1]

    @property
    def _promised(self) -> bool:
        return _promises(self._source)

    def _count_vanished(self) -> int:
        return self._ledger.buffered - self._source.get_buffer_length() if self._promised else 0


def ledger_metrics(source: Any) -> dict[str, int]:
    """Returns ``rollout/ledger/<account>`` of a data source; nothing of one without, or not yet used."""
    ledger = getattr(source, "ledger", None)
    if not isinstance(ledger, Ledger) or not ledger.issued:
        return {}
    with ledger.lock:
        counts = ledger.accounts()
        if _promises(source):
            counts["unbalanced"] += abs(ledger.buffered - source.get_buffer_length())
    return {f"rollout/ledger/{account}": groups for account, groups in counts.items()}


def _promises(source: Any) -> bool:
    return bool(vars(type(source)).get("keeps_books"))


def _name(group: list[Any]) -> str:
    first: Any = group
    while isinstance(first, list) and first:
        first = first[0]
    return f"the group of sample {getattr(first, 'index', None)}"
