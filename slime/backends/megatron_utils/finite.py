"""NaN and infinity, found where they can be named."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slime.backends.megatron_utils.named_params import named_params


class NotFinite(RuntimeError):
    """Weights or gradients hold NaN or infinity."""


def require_finite(model: Sequence[torch.nn.Module], what: str) -> None:
    """Refuses weights of this rank that are not numbers.

    Args:
        what: what they were to be used for.

    Raises:
        NotFinite: names the first parameter.
    """
    if found := _first_not_finite(model):
        raise NotFinite(f"{what}: the weights hold NaN or infinity, first in {found}")


@contextmanager
def explained_gradients(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Says in the first line what megatron-core's "found NaN in local grad norm for bucket #0" comes from.

    Raises:
        NotFinite: in place of megatron-core's error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "in local grad norm for bucket" not in text:
            raise
        found = _first_not_finite(model)
        why = f"so do the weights, first {found}" if found else "the weights do not (see rewards and loss)"
        raise NotFinite(f"the gradients hold NaN or infinity; {why} ({text.splitlines()[0]})") from error


@torch.no_grad()
def _first_not_finite(model: Sequence[torch.nn.Module]) -> str | None:
    names, flags = [], []
    for name, parameter in named_params(model):
        names.append(f"{name} {list(parameter.shape)}")
        flags.append(torch.isfinite(parameter).all())
    # One transfer from the device for all of them.
    bad = (~torch.stack(flags)).nonzero().flatten().tolist()
    return names[bad[0]] if bad else None
