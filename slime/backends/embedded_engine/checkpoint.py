"""Fills the weights, from an HF checkpoint or at random."""

from pathlib import Path

import torch

from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.models.checkpoint.weights_dir import WeightsReader


class TornWeights(ValueError):
    """A checkpoint broke off while it was read: some weights are its own, some older, one may be both."""


def load_checkpoint(parameters: NamedWeights, path: str | Path) -> None:
    """Fills all weights from a checkpoint, read straight into their places; quantised ones are dequantised.

    Raises:
        ValueError: the checkpoint lacks a weight, has one that does not fit, or a file that is not whole.
            Nothing is changed: all headers are read before the first weight.
        TornWeights: a file could not be read after all.
    """
    parameters.require_memory()
    with WeightsReader(path) as reader:
        places = _places(parameters, reader)
        try:
            with torch.no_grad():
                for name, place in places.items():
                    _fill(place, reader, name)
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise TornWeights(str(error)) from error


def _places(parameters: NamedWeights, reader: WeightsReader) -> dict[str, torch.Tensor]:
    """Where each weight of a checkpoint goes; see `load_checkpoint`."""
    reader.open_all()
    places = {}
    for name in reader.names():
        place = parameters.destination(name, reader.shape(name), reader.dtype(name))
        if place is not None:
            places[name] = place
    if missing := parameters.named.keys() - places.keys():
        raise ValueError(f"{reader.path}: {len(missing)} weights are missing, e.g. {min(missing)}")
    return places


def _fill(place: torch.Tensor, reader: WeightsReader, name: str) -> None:
    if place.dim():
        rest = [slice(0, size) for size in place.shape[1:]]
        reader.copy_rows(place, name, range(len(place)), rest)
    else:
        place.copy_(reader.read(name))


def load_random(parameters: NamedWeights, seed: int) -> None:
    """What ``--load-format dummy`` serves: small random matrices and norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in parameters.named.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            # on the host, so that a seed means the same weights on any device
            tensor.copy_(torch.empty_like(tensor, device="cpu").normal_(0.0, 0.02, generator=generator))
