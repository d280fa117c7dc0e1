"""Whether a directory is a checkpoint of a known family; tensors of one that a model has no place for."""

from pathlib import Path

from slime.config.model import ModelConfig
from slime.models import FAMILIES, HfConfigError, family_of
from slime.models.checkpoint.safetensors_dir import TensorReader
from slime.models.hf_config import read_hf_config


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` is a Hugging Face checkpoint of a known family, with safetensors files."""
    try:
        config = read_hf_config(path)
    except HfConfigError:
        return False
    return config.get("model_type") in FAMILIES and any(Path(path).glob("*.safetensors"))


def refuse_leftovers(shape: ModelConfig, reader: TensorReader) -> None:
    """Raises ValueError for tensors that the model has no place for.

    A checkpoint with tensors that the model has no place for is another model than its config says."""
    weights = family_of(shape.model_type).weights
    names, wanted = set(reader.names()), weights.hf_names(shape)
    ignored = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    if not shape.untie_embeddings_and_output_weights:
        ignored.add(weights.prefix.outer("lm_head.weight"))
    leftovers = sorted(
        name for name in names - wanted - ignored if not weights.untrained(name, shape.num_layers)
    )
    if leftovers:
        shown = ", ".join(leftovers[:5]) + (", ..." if len(leftovers) > 5 else "")
        raise ValueError(f"{reader.path}: {len(leftovers)} tensors that the model does not have: {shown}")
