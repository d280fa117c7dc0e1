"""The numbers of an adapter: W x + scale * B A x, of which A and B train (LoRA, section 4.1)."""

import hashlib
import math

import torch
import torch.nn.functional as F


def initial_down(module: str, rank: int, features: int, seed: int) -> torch.Tensor:
    """A as it begins, [rank, features] float32, as PEFT draws it: uniform within 1 / sqrt(features).

    Drawn from the name of the module and the seed, it is the same in every parallel layout. B begins with
    zeros, so that the adapted model is the base at first.
    """
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    down = torch.empty(rank, features)
    torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
    return down


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``F.linear`` that rounds alike with gradients and without.

    That one decides by whether the weight needs a gradient, which A and B put together do in training alone,
    if it takes rows that lie apart, as those behind the embedding do, for one matrix or for many.
    """
    return F.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def added(down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """What an adapter adds to a weight: scale * B A, float32."""
    return scale * (up.float() @ down.float())


def merged(weight: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The weight with what an adapter adds, summed in float32 and rounded once to the weight's dtype."""
    return (weight.float() + added).to(weight.dtype)
