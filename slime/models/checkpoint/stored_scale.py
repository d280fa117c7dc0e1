"""Which groups of a trained matrix keep the scale that they have in the checkpoint that engines serve."""

import torch


def is_kept(reach: torch.Tensor, moved: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whether a group keeps its scale; bool in the shape of the arguments, with an entry for each group.

    It does while its codes, read back, are its numbers: until training moves it. Then as long as the scale
    cuts nothing off and more than half of its range is used, so that a small step moves no number that it
    has not changed. A checkpoint's scale need not be the one that a group's numbers would get: those of a
    calibration, or of codes -8 to 7, are others.

    Args:
        reach: the largest number, of what the scale holds without cutting off more than rounding does.
        moved: whether a number is another than its code, read back in the format of the weight.
        scale: the checkpoint's. One of 0, which holds nothing but zeros, may be there for a group of them.
    """
    return (reach <= 1) & (~moved | ((reach > 0.5) & (scale != 0)))


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale in float32, 1 for 0: what is divided by it are zeros."""
    wide = scale.float()
    return torch.where(wide == 0, torch.ones_like(wide), wide)
