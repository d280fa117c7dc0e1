"""Process groups beside the default one, and reductions over them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
)
from torch.distributed.rendezvous import rendezvous


def init_process_group(
    backend: str,
    init_method: str,
    world_size: int,
    rank: int,
    group_name: str,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A process group between processes that do not share a default group.

    Trainer and engines meet in such a group for weight updates; it has to match what SGLang's
    ``/init_weights_update_group`` does: the store prefix and the group name are ``group_name``.
    """
    timeout = timeout or default_pg_timeout
    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(group_name, store),
        group_name=GroupName(group_name),
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """Whitens ``values`` with the mean and Bessel-corrected variance of the masked entries of all ranks.

    Raises:
        ValueError: no entry is unmasked on any rank.
    """
    # In float64: the variance is a small difference of large sums, and equal values must not give NaN.
    exact, mask = values.double(), mask.double()
    trained = torch.where(mask != 0, exact, 0.0)
    stats = torch.stack([(trained * mask).sum(), (trained.square() * mask).sum(), mask.sum()])
    if dist.is_initialized():
        dist.all_reduce(stats, group=process_group)
    total, squares, count = stats.unbind()
    if count == 0:
        raise ValueError("whitening: the loss mask is zero on every rank")
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0)
    if count >= 2:
        variance = variance * count / (count - 1)
    whitened = (exact - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).to(values.dtype)
