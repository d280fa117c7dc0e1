"""Process groups that trainer ranks share with engines."""

import contextlib
import itertools
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime.utils.accelerator import process_group_backend
from slime.utils.addresses import is_loopback
from slime.utils.distributed_utils import init_process_group
from slime.utils.reserved_ports import reserve_port
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import group_address
from slime.weight_sync.broken import GroupBroken, of_broken_group
from slime.weight_sync.floor import loopback_speed, probe_size
from slime.weight_sync.transports.session import EngineClients, WriterClient

logger = logging.getLogger(__name__)

_REASON_S = 2.0
"""How long a member of a broken group has to say why it broke."""


class Meeting(NamedTuple):
    """Where the members of a group find each other: trainer ranks, then the ranks of each engine in turn.

    Attributes:
        trainers: how many trainer ranks are in it.
    """

    address: str
    port: int
    name: str
    trainers: int
    world_size: int


def new_meeting(endpoints: Sequence[EngineEndpoint], trainers: int = 1) -> Meeting:
    """A place on this host for a group with engines."""
    address = group_address(endpoint.url for endpoint in endpoints)
    world_size = trainers + sum(endpoint.num_gpus for endpoint in endpoints)
    # A name of its own: an engine of somebody else's holds that of an earlier run which was killed, and
    # any engine one whose end it has missed.
    name = f"slime-pp_0-{uuid.uuid4().hex}"
    logger.info("weight group %s: %d engines, world size %d", name, len(endpoints), world_size)
    return Meeting(address, reserve_port(address), name, trainers, world_size)


def join_engines(
    meeting: Meeting, rank: int, engines: EngineClients, timeout: timedelta
) -> dist.ProcessGroup:
    """Meets the others as this rank, and invites engines.

    Args:
        engines: all of them, on one of the trainer's ranks; none on others.

    Raises:
        EngineError: an engine refused to join.
        GroupBroken: a connection ended meanwhile.
        RuntimeError: the group did not form in time.
    """
    backend = process_group_backend()
    address, port, name, trainers, world_size = meeting
    sizes = [endpoint.num_gpus for endpoint in engines.endpoints]
    offsets = dict(zip(engines.clients, itertools.accumulate(sizes, initial=trainers), strict=False))

    def invite(client: WriterClient) -> None:
        client.init_weights_update_group(address, port, offsets[client], world_size, name, backend)

    def join() -> dist.ProcessGroup:
        return init_process_group(backend, f"tcp://{address}:{port}", world_size, rank, name, timeout)

    # Joining blocks until everyone is there: in a thread, so that a refusal is noticed at once.
    with threads(1 + len(engines.clients), "join-weight-group") as pool:
        joined = pool.submit(join)
        await_answers([joined, *(pool.submit(invite, one) for one in engines.clients)], name, timeout)
    return joined.result()


def await_answers(answers: Sequence[Future], name: str, timeout: timedelta) -> None:
    """Returns when all members of a group have answered, raises once one has failed and it is known why.

    Raises:
        GroupBroken: members failed for want of their connections, and none for another reason.
        TimeoutError: one gave no answer.
    """
    _, missing = wait(answers, timeout=timeout.total_seconds(), return_when=FIRST_EXCEPTION)
    if (failure := failure_of(answers, name)) is not None:
        raise failure
    if missing:
        raise TimeoutError(
            f"weight group {name}: {len(missing)} of {len(answers)} members gave "
            f"no answer within {timeout.total_seconds():.0f} s"
        )


def failure_of(answers: Sequence[Future], name: str, limit: float = _REASON_S) -> Exception | None:
    """Why some members of a group have failed; None if none has.

    Where one ends or refuses, the others lose their connections with it, and may say so before it says why.
    If none says more than that, it is one of those that say so, all of which are named.

    Args:
        limit: seconds for which others are waited for once one has failed.
    """
    deadline = time.monotonic() + limit
    while True:
        failures = [
            error for one in answers if one.done() and isinstance(error := one.exception(), Exception)
        ]
        reasons = [error for error in failures if not of_broken_group(error)]
        rest, left = [one for one in answers if not one.done()], deadline - time.monotonic()
        if reasons or not failures or not rest or left <= 0:
            break
        wait(rest, timeout=left, return_when=FIRST_COMPLETED)
    if reasons or not failures:
        return next(iter(reasons), None)
    return GroupBroken.of(name, failures[0], [getattr(error, "url", "the trainer") for error in failures])


@contextlib.contextmanager
def naming_broken(name: str) -> Iterator[None]:
    """Raises the failure of a member of a group that has lost its connections as `GroupBroken`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GroupBroken) or not of_broken_group(error):
            raise
        raise GroupBroken.of(name, error) from error


def path_speed(endpoints: Sequence[EngineEndpoint], bucket_bytes: int) -> float:
    """What a TCP connection carries, with gloo to engines on this machine; see `Transport.path_speed`."""
    hosts = (urlsplit(endpoint.url).hostname or "" for endpoint in endpoints)
    if process_group_backend() != "gloo" or not all(map(is_loopback, hosts)):
        return math.inf
    return loopback_speed(probe_size(bucket_bytes, torch.device("cpu")))


def abandon(group: dist.ProcessGroup | None, works: list[dist.Work]) -> None:
    """Leaves a group whose messages failed, if there is one, beside what the caller does next.

    The caller has to let go of the group, and of its work.
    """
    if group is not None:
        threading.Thread(target=_abandon, args=(group, works), name="abandon-group", daemon=True).start()


def _abandon(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    """Leaves it once its messages have ended here.

    When one engine has died the others wait on for the bucket, and for nothing else, until this process
    closes its connections: when nothing refers to the group or its work any more. One that refused leaves
    the messages under way up to the time limit of the group.
    """
    with contextlib.suppress(RuntimeError):
        group.abort()  # ends messages over NCCL; gloo knows no such thing
    while works:
        work = works.pop(0)
        with contextlib.suppress(RuntimeError):
            work.wait()
        del work  # it refers to the group
    dist.destroy_process_group(group)


@contextlib.contextmanager
def threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool that is left at once: after a failure its threads wait for peers up to their own deadlines."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)
