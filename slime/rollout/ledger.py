"""The books on groups of samples: issued = trained + filtered + dropped + buffered."""

from dataclasses import asdict, dataclass
from typing import Any

from slime.rollout.base_types import RolloutError


class LedgerError(RolloutError):
    """Groups were lost or appeared from nowhere."""


@dataclass
class Ledger:
    """Groups since the start of the run. A data source owns it and saves it with its state."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: int = 0

    def unaccounted(self, buffered: int) -> int:
        """Groups that were issued but have no known fate; in flight or lost."""
        return self.issued - self.trained - self.filtered - self.dropped - buffered

    def drop_trained(self, groups: int) -> None:
        """Groups that were to be trained, and fill no optimizer step."""
        groups = min(groups, self.trained)  # a rollout function of the user's may have booked none
        self.trained -= groups
        self.dropped += groups

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class RolloutAccount:
    """What one rollout does with the groups it takes from a data source.

    Any data source will do; one with a ``ledger`` gets this rollout's figures added to it. Its books must
    balance if its class itself, not one that it inherits from, says so with ``keeps_books``: a user's
    subclass may well move groups in ways that the ledger does not see.
    """

    def __init__(self, data_source: Any) -> None:
        self._source = data_source
        self._unaccounted_before = self._unaccounted()
        self.taken = self.trained = self.filtered = self.dropped = self.buffered = 0

    def take(self, num_groups: int) -> list[Any]:
        """Fetch groups.

        Raises:
            RolloutError: the data source returned none, so waiting for more is in vain.
        """
        groups = self._source.get_samples(num_groups)
        if not groups:
            raise RolloutError(f"{type(self._source).__name__}.get_samples({num_groups}) returned no group")
        self.taken += len(groups)
        return groups

    def take_for_hook(self, num_groups: int) -> list[Any]:
        """Fetch groups for user code, which decides on their fate by itself."""
        groups = self.take(num_groups)
        self.dropped += len(groups)
        return groups

    def give_back(self, groups: list[Any]) -> None:
        """Hand unfinished groups back for a later rollout."""
        self._source.add_samples(groups)
        self.buffered += len(groups)

    def close(self) -> None:
        """Enter the figures into the data source's ledger.

        Raises:
            LedgerError: the books do not balance.
        """
        fates = self.trained + self.filtered + self.dropped + self.buffered
        if self.taken != fates:
            raise LedgerError(
                f"{self.taken} groups taken, but {self.trained} trained + {self.filtered} filtered + "
                f"{self.dropped} dropped + {self.buffered} buffered = {fates}"
            )
        ledger = getattr(self._source, "ledger", None)
        if ledger is None:
            return
        ledger.trained += self.trained
        ledger.filtered += self.filtered
        ledger.dropped += self.dropped
        if vars(type(self._source)).get("keeps_books") and self._unaccounted() != self._unaccounted_before:
            raise LedgerError(
                f"{ledger} with {self._source.get_buffer_length()} groups buffered leaves "
                f"{self._unaccounted()} unaccounted for, {self._unaccounted_before} before this rollout"
            )

    def _unaccounted(self) -> int:
        ledger = getattr(self._source, "ledger", None)
        return 0 if ledger is None else ledger.unaccounted(self._source.get_buffer_length())
