"""NaN and infinity, found where they can be named."""

from collections.abc import Iterable

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class NotFinite(RuntimeError):
    """Weights or gradients hold NaN or infinity."""


def require_finite(weights: NamedTensors, what: str) -> None:
    """Refuses weights of this rank that are not numbers.

    Args:
        what: what they were to be used for.

    Raises:
        NotFinite: names the first parameter.
    """
    if found := first_not_finite(weights):
        raise NotFinite(f"{what}: the weights hold NaN or infinity, first in {found}")


def gradients_not_finite(weights: NamedTensors, detail: str) -> NotFinite:
    """The error for such gradients, which says whether the weights are so too."""
    found = first_not_finite(weights)
    why = f"so do the weights, first {found}" if found else "the weights do not (see rewards and loss)"
    return NotFinite(f"the gradients hold NaN or infinity; {why} ({detail})")


@torch.no_grad()
def first_not_finite(weights: NamedTensors) -> str | None:
    """Name and shape of the first; None if all are finite."""
    names, flags = [], []
    for name, parameter in weights:
        names.append(f"{name} {list(parameter.shape)}")
        flags.append(torch.isfinite(parameter).all())
    # One transfer from the device for all of them.
    bad = (~torch.stack(flags)).nonzero().flatten().tolist()
    return names[bad[0]] if bad else None
