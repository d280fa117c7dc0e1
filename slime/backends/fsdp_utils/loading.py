"""Loads a Hugging Face directory into the shards of all ranks."""

import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.backends.fsdp_utils.model import empty_model, plain_config
from slime.backends.fsdp_utils.named_tensors import as_in_checkpoints, units
from slime.backends.fsdp_utils.shards import fill, on_first_rank
from slime.backends.fsdp_utils.value_head import is_of_value_head
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.models.checkpoint.passthrough import passthrough_names
from slime.models.checkpoint.tensor_views import view_at
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.weight_prefix import WeightPrefix
from slime.training.weights import NamedTensors

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_hf_weights(config: HfCheckpointConfig, model: PreTrainedModel, path: str | Path) -> None:
    """Collective. Fills every parameter and buffer with those of the directory ``path``, but no value head.

    The first rank reads them unit by unit, in the order of the model, and gives the others their shards. So
    no rank has more than its shards and one unit, a layer at most, in memory. A checkpoint whose tensors have
    other names than the model gives its own (an older format, for instance) is read as a whole by
    ``transformers`` on the first rank. Quantised weights are dequantised.

    Raises:
        ValueError: the directory cannot be read, a tensor is missing, is left over, or has another shape.
    """
    source = on_first_rank(path, lambda: _source(config, model, path))
    try:
        for unit in _trunk(model):
            values = on_first_rank(path, partial(_read_unit, source, unit))
            for name, tensor in unit:
                fill(tensor, None if values is None else values[name])
    finally:
        if source is not None:
            source.close()
    computed = {} if source is None else source.computed
    for name, buffer in model.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])
        dist.broadcast(buffer, src=0)


def _trunk(model: PreTrainedModel) -> Iterator[NamedTensors]:
    """Units without a value head, which no checkpoint of a language model has."""
    for unit in units(model):
        if kept := [pair for pair in unit if not is_of_value_head(pair[0])]:
            yield kept


def _read_unit(source: "StreamedSource | WholeSource | None", unit: NamedTensors) -> dict[str, torch.Tensor]:
    assert source is not None, "called on the first rank alone"
    return source.read(unit)


def _source(
    config: HfCheckpointConfig, model: PreTrainedModel, path: str | Path
) -> "StreamedSource | WholeSource":
    streamed = StreamedSource(model, path)
    if not streamed.differs:
        return streamed
    streamed.close()
    if model._weight_prefix != WeightPrefix():
        raise ValueError(streamed.differs)
    logger.info("%s: is read as a whole: %s", path, streamed.differs)
    return WholeSource(_read(config, path))


class StreamedSource:
    """A checkpoint, unit by unit.

    Attributes:
        differs: why it cannot be read so; empty if it can.
        computed: buffers that no checkpoint has, where the model's own are not those.
    """

    computed: Mapping[str, torch.Tensor] = MappingProxyType({})

    def __init__(self, model: PreTrainedModel, path: str | Path) -> None:
        self._model, self._reader = model, WeightsReader(path)
        self._has_value_head = any(is_of_value_head(name) for name, _ in model.named_parameters())
        self.differs = self._difference(path)

    def close(self) -> None:
        self._reader.__exit__(None, None, None)

    def _difference(self, path: str | Path) -> str:
        wanted: dict[str, torch.Size] = {}
        for unit in _trunk(self._model):
            whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in unit}
            wanted |= {name: view.shape for name, view in as_in_checkpoints(self._model, whole).items()}
        found = set(self._reader.names())
        if missing := sorted(wanted.keys() - found):
            return _shown("missing", missing)
        passthrough = set(passthrough_names(path, self._reader))
        left = [name for name in found - wanted.keys() - passthrough if not self._is_ignored(name)]
        if left:
            return _shown("unexpected", sorted(left))
        other = [name for name, shape in wanted.items() if self._reader.shape(name) != tuple(shape)]
        return _shown("mismatched", other) if other else ""

    def _is_ignored(self, name: str) -> bool:
        """A tied head, or that of a critic; what ``transformers`` says that checkpoints have in vain."""
        needless = self._model.config.get_text_config().tie_word_embeddings or self._has_value_head
        if needless and name == self._model._weight_prefix.outer("lm_head.weight"):
            return True
        ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in (r"rotary_emb\.inv_freq$", *ignored))

    def read(self, unit: NamedTensors) -> dict[str, torch.Tensor]:
        """The tensors of a unit, as the model has them, in float32."""
        flat = torch.empty(sum(tensor.numel() for _, tensor in unit))
        whole = _cut(flat, unit)
        for name, tensor in self._as_stored(unit, flat, whole).items():
            if name in self._reader.quantized:  # in parts: dequantised they are the largest tensors of all
                rest = [slice(None)] * (tensor.dim() - 1)
                self._reader.copy_rows(tensor, name, range(len(tensor)), rest)
            else:
                tensor.copy_(self._reader.read(name))
        return whole

    def _as_stored(
        self, unit: NamedTensors, flat: torch.Tensor, whole: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Views of ``flat`` by the names of the checkpoint."""
        if not self._model._weight_conversions:
            return as_in_checkpoints(self._model, whole)
        small = torch.int32 if len(flat) < 2**31 else torch.int64
        indices = _cut(torch.arange(len(flat), dtype=small), unit)
        return {
            name: view_at(flat, found, f"weight {name!r}")
            for name, found in as_in_checkpoints(self._model, indices).items()
        }


def _cut(flat: torch.Tensor, unit: NamedTensors) -> dict[str, torch.Tensor]:
    """``flat`` in parts of the unit's shapes."""
    parts = flat.split([tensor.numel() for _, tensor in unit])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(unit, parts, strict=True)}


class WholeSource:
    """A model that ``transformers`` has read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = model.state_dict(keep_vars=True)
        self.computed: Mapping[str, torch.Tensor] = dict(model.named_buffers())

    def close(self) -> None:
        """Does nothing: no file is open."""

    def read(self, unit: NamedTensors) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name] for name, _ in unit}


def _read(config: HfCheckpointConfig, path: str | Path) -> PreTrainedModel:
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,  # they are refused below, in words
        "output_loading_info": True,
    }
    with WeightsReader(path) as reader:
        if reader.quantization is None:
            options |= {"local_files_only": True, "use_safetensors": True}
            model, info = AutoModelForCausalLM.from_pretrained(
                path, trust_remote_code=config.trust_remote_code, **options
            )
        else:
            kind = type(empty_model(path, config.trust_remote_code))
            described = plain_config(path, config.trust_remote_code)
            weights = dict(reader.items())
            model, info = kind.from_pretrained(None, config=described, state_dict=weights, **options)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info[what])
        if names:
            raise ValueError(_shown(what.removesuffix("_keys"), names))
    return model


def _shown(what: str, names: list[str]) -> str:
    return f"{len(names)} {what} tensors: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
