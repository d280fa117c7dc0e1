"""Weights that engines read out of the trainer's memory by NIXL."""

import base64
import logging
import uuid
from urllib.parse import urlsplit

import torch

from slime.backends.sglang_utils.client import INFO_TIMEOUT_S, EngineClient, EngineError
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.utils.addresses import is_loopback
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.remote_memory import RemoteMemory, RemoteSpan
from slime.weight_sync.transports.session import CONFLICT, SessionTransport

logger = logging.getLogger(__name__)


class NixlTransport(SessionTransport):
    """Trainer rank 0 lays each bucket into memory that it has registered, and tells the engines where.

    Each reads it, one-sidedly, and answers when it has; then the next bucket takes its place. What a reader
    has to know goes by HTTP, under the engine's key.
    """

    choice = "nixl"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._name = ""
        self._memory: RemoteMemory | None = None
        self._place: RemoteSpan | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._prepared: RemoteSpan | None = None

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        self._plan = plan
        if self._engines.clients:
            self._prepared = self._laid_out(bucket)
        return False

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if not self._engines.clients:
            return 0
        place, self._prepared = self._prepared or self._laid_out(bucket), None
        body = {
            "session": self._name,
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            **place._asdict(),
        }
        version = self._version if is_last else None
        with self.spans.measure("apply"):
            self._engines.each(lambda engine: engine.update("/update_weights_from_session", body, version))
        return place.size

    def _laid_out(self, bucket: NamedTensors) -> RemoteSpan:
        """Fills the memory that engines read, which have read the bucket before."""
        pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        size = sum(piece.numel() for piece in pieces)
        place = self._room(size, bucket[0][1].device)
        torch.cat(pieces, out=self._buffer[:size])
        if self._buffer.device.type == "cuda":
            torch.cuda.synchronize(self._buffer.device)  # readers know nothing of streams
        return place._replace(size=size)

    def _room(self, size: int, device: torch.device) -> RemoteSpan:
        """Registered memory for a bucket, which engines know of."""
        if self._place is None or size > self._place.size or device != self._buffer.device:
            self._leave()
            expected = 0 if self._plan is None else min(self._bucket_bytes, self._plan.manifest.nbytes)
            self._begin_session(max(size, expected), device)
        assert self._place is not None
        return self._place

    def _begin_session(self, size: int, device: torch.device) -> None:
        """
        Raises:
            EngineError: an engine has no NIXL, or refused.
            RuntimeError: this process has none.
        """
        hosts = (urlsplit(endpoint.url).hostname or "" for endpoint in self._engines.endpoints)
        within_host = all(map(is_loopback, hosts))
        self._name = uuid.uuid4().hex
        self._memory = RemoteMemory(f"trainer-{self._name}", within_host)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._place = self._memory.expose(self._buffer)
        logger.info("NIXL session %s: %d bytes, %d engines", self._name, size, len(self._engines.clients))
        body = {
            "session": self._name,
            "metadata": base64.b64encode(self._memory.metadata()).decode(),
            "size": size,
            "within_host": within_host,
        }
        self._engines.each(lambda engine: engine.request("POST", "/open_weights_session", body))

    def _join(self) -> None:
        return  # with the first bucket, whose size and device are known then

    def _leave(self) -> None:
        if name := self._name:
            self._engines.each(lambda engine: _close(engine, name))
        if self._memory is not None:
            self._memory.close()
        self._name, self._memory, self._place, self._prepared = "", None, None, None
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _close(engine: EngineClient, name: str) -> None:
    """Has an engine leave. One that does not know the session, or is gone, is logged: the aim is reached."""
    try:
        engine.request(
            "POST", "/close_weights_session", {"session": name}, timeout=min(engine.timeout, INFO_TIMEOUT_S)
        )
    except EngineError as error:
        if error.status not in (None, 400, CONFLICT):
            raise
        logger.warning("NIXL session %s was not there to close: %s", name, error)
