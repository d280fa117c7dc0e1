"""What a weight update took."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """What an update took on a trainer rank, or on all of them.

    Attributes:
        sent: bytes handed over to engines.
        transfer: seconds in which weights were gathered, converted and handed over.
        floor: seconds that its path would have taken for that at least, by `Transport.path_speed`; 0 where
            that is not known.
        pause: seconds for which engines stood still, as rank 0 saw it.
        commit: seconds of it in which the slowest engine took weights in, as it says itself; 0 if none does.
        rounding: see `slime.training.weights.Weights`.
        density: which part of all bytes had to be sent, where changes or adapters alone are; else 0.
    """

    sent: int = 0
    transfer: float = 0.0
    pause: float = 0.0
    rounding: float = 0.0
    density: float = 0.0
    floor: float = 0.0
    commit: float = 0.0


def of_all_ranks(reports: Iterable[SyncReport]) -> SyncReport:
    """Ranks send side by side: their bytes add up, and the slowest one counts."""
    ranks = [SyncReport(), *reports]
    return SyncReport(
        sum(each.sent for each in ranks),
        max(each.transfer for each in ranks),
        max(each.pause for each in ranks),
        max(each.rounding for each in ranks),
        max(each.density for each in ranks),
        max(each.floor for each in ranks),
        max(each.commit for each in ranks),
    )
