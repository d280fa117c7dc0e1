"""Low-rank adapters to engines that keep the base: within a request to each of them."""

import torch

from slime.adapters.peft_config import served_config
from slime.adapters.peft_format import module_of
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.lora import LoraConfig
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.utils.tensor_bucket import serialize_tensors, tensor_sha256
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.session import SessionTransport


class AdapterTransport(SessionTransport):
    """Trainer rank 0 sends them by value, with a checksum of each tensor, to engines that stand still.

    An engine forgets the adapter that it had and loads this one under the same name, that of requests.

    Args:
        base: what the engines hold beside them.
        name: that of the adapter.
    """

    def __init__(self, config: WeightUpdateConfig, lora: LoraConfig, base: WeightPlan, name: str) -> None:
        super().__init__(config)
        self._check_pending = False  # of the base, which another transport carries
        self._lora, self._base, self._name = lora, base, name
        self._tensors: dict[str, torch.Tensor] = {}

    def open(self, version: str, plan: WeightPlan) -> None:
        self._tensors = {}
        self._pause(version, plan)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        # what is pickled has no larger storage behind it
        given = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
        self._tensors |= given
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.density = nbytes / self._base.manifest.nbytes
        return sum(tensor.nbytes for tensor in given.values())

    def commit(self) -> None:
        """
        Raises:
            EngineError: an engine refused, or has got other tensors than were sent.
            RuntimeError: the base is no longer what it was sent, under ``--check-weight-checksums``.
        """
        if not self._engines.clients:
            return
        self._require_flushed()
        config = served_config(self._lora, map(module_of, self._tensors))
        payload = serialize_tensors(self._tensors, share=False)
        checksums = {name: tensor_sha256(tensor) for name, tensor in self._tensors.items()}

        def give(engine: EngineClient) -> None:
            _unload(engine, self._name)
            body = {"lora_name": self._name, "config_dict": config, "expected_checksums": checksums}
            body["serialized_named_tensors"] = [payload] * engine.endpoint.num_gpus  # one per TP rank
            engine.update_weight_version(self._version)  # no answer of this adapter names another one
            engine.request("POST", "/load_lora_adapter_from_tensors", body)

        with self.spans.measure("apply"):
            self._engines.each(give)
        self._tensors = {}
        if self._base.sent is not None:
            self._base.sent.require_held(self._engines.clients, self._base.weights())

    def _join(self) -> None:
        return

    def _leave(self) -> None:
        self._tensors = {}


def _unload(engine: EngineClient, name: str) -> None:
    """Has the adapter forgotten, of which an engine may have none yet."""
    try:
        engine.request("POST", "/unload_lora_adapter", {"lora_name": name})
    except EngineError as error:
        if error.status != 400:
            raise
