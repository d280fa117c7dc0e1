"""Splitting and packing sequences by a cost, such as their length."""

import heapq
from collections.abc import Sequence


def karmarkar_karp(costs: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing method: indices of ``costs`` in ``k`` sets of similar cost sums.

    With ``equal_size`` each set has ``len(costs) / k`` items.

    Raises:
        ValueError: ``equal_size`` is asked for and ``k`` does not divide the number of items.
    """
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    if equal_size and len(costs) % k:
        raise ValueError(f"{len(costs)} items into {k} equal sets: wanted a multiple of {k}")
    if equal_size:
        starts = [[[i] for i in order[at : at + k]] for at in range(0, len(order), k)]
    else:
        starts = [[[i]] + [[] for _ in range(k - 1)] for i in order]
    heap: list[tuple[float, int, list[list[int]]]] = []
    for tie, sets in enumerate(starts):
        heap.append(_state(sets, costs, tie))
    heapq.heapify(heap)
    tie = len(starts)
    while len(heap) > 1:
        _, _, widest = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        # The dearest set of one takes the cheapest of the other.
        merged = [a + b for a, b in zip(widest, reversed(other), strict=True)]
        heapq.heappush(heap, _state(merged, costs, tie))
        tie += 1
    return heap[0][2] if heap else [[] for _ in range(k)]


def _state(sets: list[list[int]], costs: Sequence[float], tie: int) -> tuple[float, int, list[list[int]]]:
    sets = sorted(sets, key=lambda members: sum(costs[i] for i in members), reverse=True)
    spread = sum(costs[i] for i in sets[0]) - sum(costs[i] for i in sets[-1])
    return -spread, tie, sets


def get_seqlen_balanced_partitions(costs: Sequence[float], k: int, equal_size: bool) -> list[list[int]]:
    """`karmarkar_karp`, each partition sorted.

    Raises:
        ValueError: there are fewer items than partitions, or see `karmarkar_karp`.
    """
    if len(costs) < k:
        raise ValueError(f"{len(costs)} items into {k} partitions: wanted at least {k} items")
    partitions = [sorted(members) for members in karmarkar_karp(costs, k, equal_size)]
    # Zero costs may all end up in one set: an empty one takes from the largest.
    for empty in (p for p in partitions if not p):
        empty.append(max(partitions, key=len).pop())
    return partitions


def first_fit_pack(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Bins of at most ``cap`` in total, each item into the first bin with room; an oversize item is alone."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for i, length in enumerate(lengths):
        at = next((b for b, load in enumerate(loads) if load + length <= cap), None)
        if at is None:
            bins.append([i])
            loads.append(length)
        else:
            bins[at].append(i)
            loads[at] += length
    return bins


def expand_bins_by_splitting(
    bins: Sequence[Sequence[int]], target: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Splits the largest bin that has several items into two balanced halves until there are ``target``.

    Raises:
        ValueError: there are fewer items than ``target``.
    """
    result = [list(members) for members in bins]
    while len(result) < target:
        candidates = [b for b, members in enumerate(result) if len(members) > 1]
        if not candidates:
            raise ValueError(f"{len(result)} samples cannot make {target} micro-batches")
        at = max(candidates, key=lambda b: sum(lengths[i] for i in result[b]))
        members = result.pop(at)
        halves = get_seqlen_balanced_partitions([lengths[i] for i in members], 2, equal_size=False)
        result[at:at] = [[members[i] for i in half] for half in halves]
    return result


def get_reverse_idx(order: Sequence[int]) -> list[int]:
    """The inverse permutation: ``order[inverse[i]] == i``."""
    inverse = [0] * len(order)
    for position, index in enumerate(order):
        inverse[index] = position
    return inverse
