"""Which sample is trained in which optimizer step, micro-batch and data-parallel rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slime.config.batches import BatchConfig
from slime.config.model import ModelConfig
from slime.models import calculate_fwd_flops
from slime.utils.seqlen_balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
)


class DpSchedule(NamedTuple):
    """The schedule of one rollout.

    Attributes:
        partitions: per rank, the positions of its samples in the batch.
        micro_batch_indices: per rank, the micro-batches as indices into its partition, which they tile.
        num_microbatches: per optimizer step, the same on all ranks.
        global_batch_sizes: per optimizer step, its number of rollouts over all ranks.
        adapter_steps: of a rollout of several adapters, whose steps are cut by them: per part the number of
            its step and its adapter. The two before it are per part then. Else empty.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    adapter_steps: list[tuple[int, str]]


class TooFewRolloutsError(AssertionError, ValueError):
    """A rollout is smaller than one step."""


def dp_schedule(
    batches: BatchConfig,
    model: ModelConfig,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    adapters: Sequence[str] | None = None,
) -> DpSchedule:
    """Cuts a rollout into optimizer steps, and each step into micro-batches for each rank.

    A step takes the samples of the next ``global_batch_size`` rollout ids; ids that fill no step are
    dropped. Depends on nothing but its arguments.

    Args:
        train_parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
        total_lengths: tokens of each sample.
        rollout_indices: rollout id of each sample.
        adapters: the name of each sample's, where there are several.

    Raises:
        ValueError: too few rollouts for a step, too few samples for the ranks, or static micro-batches
            that do not divide evenly.
    """
    dp_size = train_parallel_config["dp_size"]
    steps = _steps(rollout_indices, global_batch_size)
    schedule = DpSchedule([[] for _ in range(dp_size)], [[] for _ in range(dp_size)], [], [], [])
    for step, adapter, members in _parts(steps, adapters):
        if len(members) < dp_size:
            whose = "" if adapter is None else f" of adapter {adapter}"
            raise ValueError(
                f"step {step} has {len(members)} samples{whose}, wanted at least dp_size {dp_size}"
            )
        bins = _pack(batches, model, train_parallel_config, members, total_lengths)
        shares = _distribute(batches, model, bins, dp_size, total_lengths)
        for rank, share in enumerate(shares):
            for bin_index in share:
                start = len(schedule.partitions[rank])
                schedule.partitions[rank] += bins[bin_index]
                schedule.micro_batch_indices[rank].append([*range(start, len(schedule.partitions[rank]))])
        schedule.num_microbatches.append(len(bins) // dp_size)
        if adapter is None:
            schedule.global_batch_sizes.append(global_batch_size)
        else:
            schedule.global_batch_sizes.append(len({rollout_indices[position] for position in members}))
            schedule.adapter_steps.append((step, adapter))
    return schedule


def _parts(
    steps: Sequence[list[int]], adapters: Sequence[str] | None
) -> Iterator[tuple[int, str | None, list[int]]]:
    """The samples of each step, or of each adapter within each step, by their names."""
    for step, members in enumerate(steps):
        if adapters is None:
            yield step, None, members
            continue
        for name in sorted({adapters[position] for position in members}):
            yield step, name, [position for position in members if adapters[position] == name]


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    adapters: Sequence[str] | None = None,
) -> DpSchedule:
    """Makes the `dp_schedule` of what ``args`` say, for plug-ins."""
    return dp_schedule(
        args,
        args,
        train_parallel_config,
        total_lengths,
        global_batch_size=global_batch_size,
        rollout_indices=rollout_indices,
        adapters=adapters,
    )


def _steps(rollout_indices: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Sample positions of each step, grouped by rollout id in the order in which the ids appear."""
    samples_of: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_indices):
        samples_of.setdefault(rollout_id, []).append(position)
    groups = list(samples_of.values())
    num_steps = len(groups) // global_batch_size
    if num_steps < 1:
        raise TooFewRolloutsError(
            f"--global-batch-size {global_batch_size}: the rollout has only {len(groups)} ids (num_rollouts)"
        )
    return [
        [p for group in groups[i * global_batch_size : (i + 1) * global_batch_size] for p in group]
        for i in range(num_steps)
    ]


def _pack(
    batches: BatchConfig,
    model: ModelConfig,
    config: Mapping[str, int],
    members: list[int],
    total_lengths: Sequence[int],
) -> list[list[int]]:
    """Micro-batches of one step as lists of sample positions; their number fits every rank."""
    lengths = [total_lengths[p] for p in members]
    multiple = config["dp_size"]
    if (config.get("vpp_size") or 1) > 1:
        multiple *= config["microbatch_group_size_per_vp_stage"]
    if not batches.use_dynamic_batch_size:
        bins = _static_bins(batches, len(members), multiple)
    else:
        assert batches.max_tokens_per_gpu is not None, "--use-dynamic-batch-size needs it"
        cap = batches.max_tokens_per_gpu * config["cp_size"]
        if batches.balance_by_flops:
            # Equal from the start: splitting them to get to the multiple would leave halves.
            count = _count(-(-sum(lengths) // cap), multiple, len(lengths))
            bins = get_seqlen_balanced_partitions(_flops(model, lengths), count, equal_size=False)
        else:
            bins = _fill(lengths, cap, multiple)
    return [[members[i] for i in indices] for indices in bins]


def _fill(lengths: Sequence[int], cap: int, multiple: int) -> list[list[int]]:
    """Fills as many bins as first-fit needs within the budget, and as the ranks need, filled alike.

    First-fit's own bins are full but for the last, and one split in two makes two halves: some rank would
    have up to twice another's tokens, and all wait for it. They are kept only where bins that are alike
    would not stay within the budget, and first-fit's do.
    """
    bins = first_fit_pack(lengths, cap)
    count = _count(len(bins), multiple, len(lengths))
    alike = sorted(get_seqlen_balanced_partitions(lengths, count, equal_size=False))
    if count < len(bins) or all(len(b) == 1 or sum(lengths[i] for i in b) <= cap for b in alike):
        return alike
    return expand_bins_by_splitting(bins, count, lengths)


def _count(needed: int, multiple: int, samples: int) -> int:
    """The next multiple of bins, so that every rank gets equally many.

    Where there are too few samples for that, as with executions that were split unevenly, the one before,
    although bins may then exceed the token budget.

    Raises:
        ValueError: there are fewer samples than that.
    """
    if samples < multiple:
        raise ValueError(f"a step has {samples} samples, wanted one for each of {multiple} micro-batches")
    return min(-(-needed // multiple), samples // multiple) * multiple


def _static_bins(batches: BatchConfig, count: int, multiple: int) -> list[list[int]]:
    size = batches.micro_batch_size
    bins = [[*range(at, min(at + size, count))] for at in range(0, count, size)]
    if count % size or len(bins) % multiple:
        raise ValueError(
            f"--micro-batch-size {size}: {count} samples of a step do not divide into micro-batches "
            f"for {multiple} ranks; wanted a multiple of {size * multiple}"
        )
    return bins


def _distribute(
    batches: BatchConfig,
    model: ModelConfig,
    bins: list[list[int]],
    dp_size: int,
    total_lengths: Sequence[int],
) -> list[list[int]]:
    """Indices of the bins of each rank, equally many."""
    if not batches.balance_data:
        return [[*range(rank, len(bins), dp_size)] for rank in range(dp_size)]
    flops = _flops(model, total_lengths)
    costs = [sum(flops[p] for p in members) for members in bins]
    return get_seqlen_balanced_partitions(costs, dp_size, equal_size=True)


def _flops(model: ModelConfig, lengths: Sequence[int]) -> list[float]:
    """Counts the FLOPs of a forward pass over each sequence.

    Packed ones do not attend to one another, so they add up.
    """
    of_length = {length: calculate_fwd_flops([length], model) for length in {*lengths}}
    return [of_length[length] for length in lengths]
