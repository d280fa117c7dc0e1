"""Gradients that megatron-core refuses, said in words."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slime.backends.megatron_utils.named_params import named_params
from slime.training.finite import gradients_not_finite


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
        raise gradients_not_finite(named_params(model), text.splitlines()[0]) from error
