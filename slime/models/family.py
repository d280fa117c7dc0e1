"""What a model family is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.models.flops import decoder_forward_flops
from slime.models.hf_config import HfConfig
from slime.models.rules import WeightMap
from slime.models.shape import ModelShape, ShapeArgs


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        shape: reads config.json; refuses by name what is not computed exactly.
        weights: how megatron-core's parameters correspond to the tensors of a checkpoint.
        layer_spec: dotted path of fn(args, config, vp_stage) that gives megatron-core's layers.
        forward_flops: of a forward pass over sequences of these lengths.
        like_llama: whether the embedded engine's own forward pass computes it; others it serves with
            ``transformers``, which is slower.
        known_to_transformers_as: the ``model_type`` that it has there, where that is another one.
    """

    shape: Callable[[HfConfig], ModelShape]
    weights: WeightMap
    layer_spec: str = "slime.backends.megatron_utils.layer_spec.layer_spec"
    forward_flops: Callable[[Sequence[int], ShapeArgs], float] = decoder_forward_flops
    like_llama: bool = False
    known_to_transformers_as: str | None = None
