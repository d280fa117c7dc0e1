"""Weights as changes over the process group, to engines that keep what they were sent before."""

import logging
from collections import deque
from typing import NamedTuple

import torch

from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.session import WriterClient
from slime.weight_sync.versions.codec import Bytes
from slime.weight_sync.versions.live import SentState, SentTensor

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What is to be sent of a bucket.

    Attributes:
        device: of its tensors.
    """

    tensors: list[SentTensor]
    payload: Bytes
    device: torch.device


class GroupDeltaTransport(BroadcastTransport):
    """Trainer rank 0 broadcasts what has changed since the update that every engine says it holds.

    Trainer and engines each keep the bytes of the weights as they were sent, in host memory. All weights are
    sent to all engines first, where one of them does not hold what was sent last, as a new one, and after an
    update that failed: nobody has confirmed it.

    Changes are found before engines stand still, until what is to be sent of them has the bytes of a bucket.
    """

    looks_ahead = True
    _has_begun = False

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        sync = config.weight_sync
        self._encoding, self._algorithm = sync.update_weight_delta_encoding, sync.update_weight_delta_checksum
        self._sent = SentState(self._encoding, self._algorithm)
        self._base: str | None = None
        self._number = 0

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "delta"

    def open(self, version: str, plan: WeightPlan) -> None:
        self._begin()
        super().open(version, plan)

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        if not self._engines.clients:
            return False
        self._begin()
        self._found.append(self._changes(bucket))
        return sum(found.payload.nbytes for found in self._found) < self._bucket_bytes

    def _begin(self) -> None:
        """An update starts, of what engines say now that they hold."""
        if self._has_begun or not self._engines.clients:
            return
        self._base, self._number, self._has_begun = self._confirmed(), 0, True
        self._sent.begin(whole=self._base is None)

    def _changes(self, bucket: NamedTensors) -> Found:
        return Found(*self._sent.bucket(bucket), bucket[0][1].device)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._group is None and self._under_way is None:
            return 0
        found = self._found.popleft() if self._found else self._changes(bucket)
        body = {
            "tensors": [tensor._asdict() for tensor in found.tensors],
            "checksum": self._algorithm,
            "base": self._base,
            "number": self._number,
            "group_name": self._group_name,
            "state": self._sent.leads_to() if is_last else None,
        }
        version = self._version if is_last else None
        self._number += 1

        def announce(client: WriterClient) -> None:
            client.update("/update_weights_from_changes", body, version)

        flat = torch.from_numpy(found.payload).to(found.device)
        self._carry([flat] if found.payload.size else [], announce, is_last)
        return found.payload.nbytes

    def resume(self) -> None:
        super().resume()
        self._has_begun = False
        if self._engines.clients:
            self._sent.confirm()
            whole = self._base is None
            self.density = 0.0 if whole else self._sent.changed / max(self._sent.nbytes, 1)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._has_begun = False
        self._found: deque[Found] = deque()

    def _confirmed(self) -> str | None:
        """The state that changes can be of; None if all weights have to be sent."""
        state = self._sent.state
        if state is None:
            logger.info("weights come whole: no update before is known to be complete")
            return None
        held = self._engines.each(lambda engine: engine.request("GET", "/weights_base")["state"])
        for client, found in zip(self._engines.clients, held, strict=True):
            if found != state:
                logger.info("weights come whole: %s holds %s, not %s", client, found, state)
                return None
        return state
