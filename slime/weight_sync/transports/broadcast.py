"""Weights by broadcast over a process group that the trainer shares with the engines."""

import contextlib
import itertools
import logging
import math
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.utils.accelerator import process_group_backend
from slime.utils.addresses import is_loopback
from slime.utils.distributed_utils import init_process_group
from slime.utils.reserved_ports import reserve_port
from slime.utils.tensor_bucket import FlatBuffer
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import group_address
from slime.weight_sync.floor import loopback_speed, probe_size
from slime.weight_sync.transports.session import SessionTransport

logger = logging.getLogger(__name__)


class BroadcastTransport(SessionTransport):
    """One group for all engines: trainer rank 0, then the ranks of each engine in turn.

    A group per pipeline stage would let stages broadcast at the same time. It is not needed: the backend
    brings every stage's tensors to rank 0, which moves the same bytes once more, between trainers.

    Each bucket is one flat uint8 tensor (``load_format="flattened_bucket"``), its metadata goes by HTTP.
    """

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._buffer = FlatBuffer()

    def path_speed(self) -> float:
        """What a TCP connection carries, with gloo to engines on this machine."""
        hosts = (urlsplit(endpoint.url).hostname or "" for endpoint in self._engines.endpoints)
        if process_group_backend() != "gloo" or not all(map(is_loopback, hosts)):
            return math.inf
        return loopback_speed(probe_size(self._bucket_bytes, torch.device("cpu")))

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._group is None:
            return 0
        flat = self._buffer.flatten(bucket)
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]

        def announce(client: EngineClient) -> None:
            client.update_weights_from_distributed(
                names,
                dtypes,
                shapes,
                self._group_name,
                load_format="flattened_bucket",
                weight_version=self._version if is_last else None,
            )

        with _threads(len(self._engines.clients), "announce-bucket") as pool:
            answers = [pool.submit(announce, client) for client in self._engines.clients]
            self._broadcast(flat.flattened_tensor, answers)
        return flat.flattened_tensor.nbytes

    def _leave(self) -> None:
        if name := self._group_name:
            self._engines.each(lambda client: client.destroy_weights_update_group(name))
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._group_name, self._buffer = None, "", FlatBuffer()

    def _join(self) -> None:
        """
        Raises:
            EngineError: an engine refused to join.
            RuntimeError: the group did not form in time.
        """
        if self._engines.endpoints:
            self._form_group(self._engines.endpoints)

    def _form_group(self, endpoints: Sequence[EngineEndpoint]) -> None:
        address = group_address(endpoint.url for endpoint in endpoints)
        port = reserve_port(address)
        sizes = [endpoint.num_gpus for endpoint in endpoints]
        offsets = dict(zip(self._engines.clients, itertools.accumulate(sizes, initial=1), strict=False))
        world_size = 1 + sum(sizes)
        # A name of its own: an engine of somebody else's holds that of an earlier run which was killed, and
        # any engine one whose end it has missed.
        name = self._group_name = f"slime-pp_0-{uuid.uuid4().hex}"
        backend = process_group_backend()
        logger.info("weight group %s: %d engines, world size %d", name, len(endpoints), world_size)

        def invite(client: EngineClient) -> None:
            client.init_weights_update_group(address, port, offsets[client], world_size, name, backend)

        def join() -> None:
            url = f"tcp://{address}:{port}"
            self._group = init_process_group(backend, url, world_size, 0, name, self._timeout)

        # Joining blocks until everyone is there: in a thread, so that a refusal is noticed at once.
        with _threads(1 + len(endpoints), "join-weight-group") as pool:
            answers = [pool.submit(invite, client) for client in self._engines.clients]
            self._await_answers([pool.submit(join), *answers])

    def _broadcast(self, flat: torch.Tensor, answers: list[Future[None]]) -> None:
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        try:
            self._await_answers(answers)
            work.wait()
        except Exception:
            group, self._group = self._group, None
            threading.Thread(target=_abandon, args=(group, work), name="abandon-group", daemon=True).start()
            del group
            raise
        finally:
            del work  # the traceback of a failure would keep it, and it the group's connections

    def _await_answers(self, answers: list[Future[None]]) -> None:
        """Returns when all have answered, raises as soon as one has failed."""
        done, _ = wait(answers, timeout=self._timeout.total_seconds(), return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        if len(done) < len(answers):
            raise TimeoutError(
                f"weight group {self._group_name}: {len(answers) - len(done)} of {len(answers)} members gave "
                f"no answer within {self._timeout.total_seconds():.0f} s"
            )


def _abandon(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Leaves a group whose broadcast failed, once that has ended here.

    When one engine has died the others wait on for the bucket, and for nothing else, until this process
    closes its connections: when nothing refers to the group or its work any more. One that refused leaves
    the broadcast under way up to the time limit of the group.
    """
    with contextlib.suppress(RuntimeError):
        group.abort()  # ends a broadcast over NCCL; gloo knows no such thing
        work.wait()
    dist.destroy_process_group(group)


@contextlib.contextmanager
def _threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool that is left at once: after a failure its threads wait for peers up to their own deadlines."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)
