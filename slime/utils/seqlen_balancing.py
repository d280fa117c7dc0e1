"""Splitting and packing sequences by a cost, such as their length."""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def karmarkar_karp(costs: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing method: indices of ``costs`` in ``k`` sets of similar cost sums, dearest first.

    With ``equal_size`` each set has ``len(costs) / k`` items. Takes O(n log n) steps for n items.

    Raises:
        ValueError: ``equal_size`` is asked for and ``k`` does not divide the number of items.
    """
    if equal_size and len(costs) % k:
        raise ValueError(f"{len(costs)} items into {k} equal sets: wanted a multiple of {k}")
    order = sorted(range(len(costs)), key=lambda i: costs[i], reverse=True)
    size = k if equal_size else 1

    def spread_at(at: int) -> float:
        return costs[order[at]] - (costs[order[at + size - 1]] if size == k else 0)

    # What no merge has touched yet: the items of a start go into one set each. The widest is last.
    starts = sorted(range(0, len(order), size), key=spread_at)
    heap: list[tuple[float, int, _Sets]] = []

    def pop_widest() -> _Sets:
        if starts and not (heap and -heap[0][0] > spread_at(starts[-1])):
            items = order[(at := starts.pop()) : at + size]
            return _Sets([-costs[i] for i in items], [[i] for i in items])
        return heapq.heappop(heap)[2]

    for tie in range(len(starts) - 1):
        merged = pop_widest().merge(pop_widest(), k)
        heapq.heappush(heap, (-merged.spread(k), tie, merged))
    sets = pop_widest().members if order else []
    return [*sets, *([] for _ in range(k - len(sets)))]


@dataclass(slots=True)
class _Sets:
    """Up to ``k`` sets that are not empty, dearest first: their negated costs, and their items."""

    negated: list[float]
    members: list[list[int]]

    def spread(self, k: int) -> float:
        """The dearest less the cheapest; there is an empty one as long as there are fewer than ``k``."""
        return (self.negated[-1] if len(self.negated) == k else 0) - self.negated[0]

    def merge(self, other: "_Sets", k: int) -> "_Sets":
        """Merges both into one of ``k`` sets: the dearest of one takes the cheapest of the other.

        Uses both up.
        """
        large, small = (self, other) if len(self.negated) >= len(other.negated) else (other, self)
        # Empty sets of the small one are its cheapest, so the dearest of the large one stay as they are.
        untouched = k - len(small.negated)
        negated, members = large.negated[untouched:], large.members[untouched:]
        del large.negated[untouched:], large.members[untouched:]
        for i in range(len(small.negated)):
            cost, items = small.negated[-1 - i], small.members[-1 - i]
            if i < len(members):
                cost += negated[i]
                shorter, items = sorted((members[i], items), key=len)
                items += shorter
            at = bisect.bisect(large.negated, cost)
            large.negated.insert(at, cost)
            large.members.insert(at, items)
        return large


def get_seqlen_balanced_partitions(costs: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """`karmarkar_karp`, each partition sorted; none is empty.

    Raises:
        ValueError: there are fewer items than partitions, or see `karmarkar_karp`.
    """
    if len(costs) < k:
        raise ValueError(f"{len(costs)} items into {k} partitions: wanted at least {k} items")
    return [sorted(members) for members in karmarkar_karp(costs, k, equal_size)]


def first_fit_pack(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Bins of at most ``cap`` in total, each item into the first bin with room; an oversize item is alone.

    Takes O(n log n) steps: ``room`` is a binary tree over as many bins as there could be, whose nodes know
    the most room below them. The children of node i are 2 i and 2 i + 1.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [cap] * (2 * leaves)
    bins: list[list[int]] = []
    for i, length in enumerate(lengths):
        node = 1 if length <= cap else leaves + len(bins)
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node == leaves + len(bins):
            bins.append([])
        bins[node - leaves].append(i)
        room[node] -= length
        while node := node // 2:
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins


def expand_bins_by_splitting(
    bins: Sequence[Sequence[int]], target: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Splits the largest bin that has several items into two balanced halves until there are ``target``.

    Raises:
        ValueError: there are fewer items than ``target``.
    """
    result = [list(members) for members in bins]
    loads = [sum(lengths[i] for i in members) for members in result]
    while len(result) < target:
        candidates = [b for b, members in enumerate(result) if len(members) > 1]
        if not candidates:
            raise ValueError(f"{len(result)} samples cannot make {target} micro-batches")
        at = max(candidates, key=lambda b: loads[b])
        members = result[at]
        halves = get_seqlen_balanced_partitions([lengths[i] for i in members], 2, equal_size=False)
        result[at : at + 1] = [[members[i] for i in half] for half in halves]
        loads[at : at + 1] = [sum(lengths[i] for i in half) for half in result[at : at + 2]]
    return result


def get_reverse_idx(order: Sequence[int]) -> list[int]:
    """The inverse permutation: ``order[inverse[i]] == i``."""
    inverse = [0] * len(order)
    for position, index in enumerate(order):
        inverse[index] = position
    return inverse
