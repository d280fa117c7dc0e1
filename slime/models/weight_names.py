"""Which weights a checkpoint directory has, for a look at it before anything starts."""

from pathlib import Path

from slime.models.expert_forms import stacks_of
from slime.models.hf_config import HfConfig
from slime.models.quantization import read_quantization
from slime.models.safetensors_index import SafetensorIndex


def weight_names(path: str | Path) -> set[str]:
    """The names of all weights, under those that a model has; reads no more than headers.

    Raises:
        ValueError: see `slime.models.weights_dir.WeightsReader`.
    """
    with _opened(path) as index:
        index.open_all()
        return set(index.names())


def has_plain_names(path: str | Path) -> bool:
    """Whether the files name the weights as the model does, and hold them unquantised."""
    with SafetensorIndex(path) as index:
        return _has_plain_names(index)


def _opened(path: str | Path) -> SafetensorIndex:
    index = SafetensorIndex(path)
    if _has_plain_names(index):
        return index
    from slime.models.weights_dir import WeightsReader  # imports torch

    return WeightsReader(path)


def _has_plain_names(index: SafetensorIndex) -> bool:
    """Whether the files name the weights as the model does."""
    try:
        if not (index.path / "config.json").is_file():
            return True
        config = HfConfig.read(index.path)
        return read_quantization(config) is None and not stacks_of(index.names(), config)
    except ValueError:  # the other reader says what is wrong
        return False
