"""Process groups beside the default one, and reductions over them."""

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    ProcessGroupGloo,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
    default_pg_timeout,
)

from slime.utils.accelerator import process_group_backend
from slime.utils.addresses import is_loopback
from slime.utils.reserved_ports import listening_at

_GLOO_THREADS = 2  # that run a group's collectives, as by default


def join_process_group(timeout_minutes: float) -> None:
    """Joins the default group that RANK, WORLD_SIZE and MASTER_* describe; one that exists is used as it is.

    Under torchrun its store is used, which listens at MASTER_* already.

    Raises:
        RuntimeError: the other ranks did not join in time; the message says which rank waited for how many.
    """
    if dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(minutes=timeout_minutes)
    if is_loopback(host):
        # Else gloo listens on the interface that the host's name leads to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_gloo_device()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        dist.init_process_group(
            process_group_backend(),
            store=None if served else meeting_store(host, port, world_size, rank, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except dist.DistError as error:
        where = f"no process group at {host}:{port} within {timeout_minutes} minutes"
        raise RuntimeError(f"trainer rank {rank} of {world_size}: {where}") from error


def share_gloo_device() -> None:
    """Has all gloo groups that this process makes from now on share one device.

    By itself each has its own: a socket that listens, and a thread that wakes 100 times a second, also where
    nothing is sent. megatron-core makes two dozen groups of a rank.
    """
    own = ProcessGroupGloo.__init__
    if hasattr(own, "shared_device"):
        return
    device = ProcessGroupGloo.create_default_device()

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout, options._threads = [device], timeout, _GLOO_THREADS
        own(self, store, rank, size, options)

    init.shared_device = device  # type: ignore[attr-defined]
    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


def bound_collectives(timeout_minutes: float) -> None:
    """Gives the collectives of every group that this process is in so far the same time limit.

    A device mesh makes groups without one, and so does megatron-core here and there: torch then has its own,
    10 minutes over NCCL and 30 over gloo, whatever the default group has.
    """
    for group in _world.pg_map:
        _set_pg_timeout(timedelta(minutes=timeout_minutes), group)


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
    store = _store_at(init_method, world_size, rank, timeout)
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


def join_again(
    init_method: str, world_size: int, rank: int, group_name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Joins a gloo group of `init_process_group` as one more rank of this process.

    torch knows a group by its name, once in a process, and so nothing of what is returned: only its own
    methods work.
    """
    store = PrefixStore(group_name, _store_at(init_method, world_size, rank, timeout))
    # As torch's own prefixes, within which the other ranks meet.
    inner = PrefixStore("cpu/", PrefixStore(f"{group_name}/", store))
    return ProcessGroupGloo(inner, rank, world_size, timeout)  # type: ignore[return-value]


def _store_at(init_method: str, world_size: int, rank: int, timeout: timedelta) -> dist.TCPStore:
    meeting = urlsplit(init_method)
    assert meeting.scheme == "tcp" and meeting.hostname and meeting.port, init_method
    return meeting_store(meeting.hostname, meeting.port, world_size, rank, timeout)


def meeting_store(host: str, port: int, world_size: int, rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store in which the ranks of a group find each other; returns when all of them are there.

    Rank 0 serves it, without a key. torch would listen on all interfaces of the machine; here it listens on
    ``host`` alone, and so for loopback not beyond this machine.

    Raises:
        torch.distributed.DistError: not all were there in time.
    """
    listener = listening_at(host, port) if rank == 0 else None
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        # The store closes it.
        master_listen_fd=listener.detach() if listener is not None else None,
    )


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
