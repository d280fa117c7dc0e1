"""Tensors of a checkpoint that no trainer changes: towers for images, MTP layers."""

from pathlib import Path

from slime.models.checkpoint.safetensors_dir import TensorReader
from slime.models.families import FAMILIES
from slime.models.hf_config import HfConfig
from slime.models.mtp import behind_last_layer


def passthrough_names(path: str | Path, reader: TensorReader) -> list[str]:
    """Returns the names of passthrough tensors in the directory ``path``, which ``reader`` reads; none of a
    model without a family.

    Layers that config.json does not count, as where it was changed to make a smaller model, are left out.
    """
    config = HfConfig.read(path)
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        return []
    # Not the family's shape, which refuses what the Megatron trainer alone does not compute.
    weights, layers = family.weights, config.text.size("num_hidden_layers")
    counted = layers + (config.text.get("num_nextn_predict_layers") or 0)
    return [
        name
        for name in reader.names()
        if weights.untrained(name, layers) and not behind_last_layer(weights.prefix.inner(name), counted)
    ]
