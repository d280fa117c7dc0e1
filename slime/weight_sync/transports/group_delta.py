"""Weights as changes over the process group, to engines that keep what they were sent before."""

import logging

import torch

from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.session import WriterClient
from slime.weight_sync.versions.live import SentState

logger = logging.getLogger(__name__)


class GroupDeltaTransport(BroadcastTransport):
    """Trainer rank 0 broadcasts what has changed since the update that every engine says it holds.

    Trainer and engines each keep the bytes of the weights as they were sent, in host memory. All weights are
    sent to all engines first, where one of them does not hold what was sent last, as a new one, and after an
    update that failed: nobody has confirmed it.
    """

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
        if self._engines.clients:
            self._base, self._number = self._confirmed(version), 0
            self._sent.begin(whole=self._base is None)
        super().open(version, plan)

    def prepare(self, bucket: NamedTensors) -> None:
        return  # what has changed is known when the engines have said what they hold

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._group is None:
            return 0
        sent, payload = self._sent.bucket(bucket)
        body = {
            "tensors": [tensor._asdict() for tensor in sent],
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

        flat = torch.from_numpy(payload).to(bucket[0][1].device)
        self._carry([flat] if payload.size else [], announce)
        return payload.nbytes

    def resume(self) -> None:
        super().resume()
        if self._engines.clients:
            self._sent.confirm()
            whole = self._base is None
            self.density = 0.0 if whole else self._sent.changed / max(self._sent.nbytes, 1)

    def _confirmed(self, version: str) -> str | None:
        """The state that changes can be of; None if all weights have to be sent."""
        state = self._sent.state
        if state is None:
            logger.info("version %s comes whole: no update before it is known to be complete", version)
            return None
        held = self._engines.each(lambda engine: engine.request("GET", "/weights_base")["state"])
        for client, found in zip(self._engines.clients, held, strict=True):
            if found != state:
                logger.info("version %s comes whole: %s holds %s, not %s", version, client, found, state)
                return None
        return state
