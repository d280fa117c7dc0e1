"""What a model family is; and one whose language model is inside a larger model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slime.config.model import ModelConfig
from slime.models.flops import decoder_forward_flops
from slime.models.hf_config import HfConfig
from slime.models.rules import WeightMap
from slime.models.shape import ModelShape, Sizes
from slime.models.weight_prefix import WeightPrefix


def _no_tensors(shape: ModelShape) -> Iterable[tuple[str, Sizes]]:
    del shape
    return ()


@dataclass(frozen=True)
class InSglang:
    """What SGLang 0.5.23 does whatever config.json says.

    Attributes:
        own_head: it makes an output layer without looking at ``tie_word_embeddings``.
        all_sparse: it gives experts to every layer.
    """

    own_head: bool = False
    all_sparse: bool = False


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
        own_tensors: names within a layer, and shapes, of a checkpoint's tensors that few families have.
        attention: the kind of attention, where trainers do not split it in packed rows as they do others.
        estimated: whether ``--check`` knows what its layers keep for the backward pass.
        in_mxfp4: whether checkpoints may be in MXFP4: which matrices are transposed there no file says.
        in_sglang: where SGLang's model is another one.
    """

    shape: Callable[[HfConfig], ModelShape]
    weights: WeightMap
    layer_spec: str = "slime.backends.megatron_utils.layer_spec.layer_spec"
    forward_flops: Callable[[Sequence[int], ModelConfig], float] = decoder_forward_flops
    like_llama: bool = False
    known_to_transformers_as: str | None = None
    own_tensors: Callable[[ModelShape], Iterable[tuple[str, Sizes]]] = _no_tensors
    attention: str = ""
    estimated: bool = True
    in_mxfp4: bool = False
    in_sglang: InSglang = InSglang()


def nested_family(
    text: Family, prefix: WeightPrefix, passthrough: Sequence[str], *, tied: bool = False
) -> Family:
    """The family of checkpoints whose ``text_config`` describes a model of the family ``text``.

    Only the language model is trained and served, as in published checkpoints of models that read images; the
    tensors of the rest are carried over as they are.

    Args:
        text: of the language model.
        prefix: of its tensors.
        passthrough: prefixes of the tensors of the other parts, which are carried over unchanged.
        tied: whether the head is the embedding where config.json does not say so of the whole model.
    """
    others, untrained = tuple(passthrough), text.weights.untrained

    def shape(config: HfConfig) -> ModelShape:
        if config.get("text_config") is None:
            raise config.wrong("text_config", None, "the config of the language model")
        # What is said of the whole model counts, even if it is said by leaving it out.
        whole = config.filled(tie_word_embeddings=tied)
        return replace(text.shape(whole.text), model_type=config.get("model_type"))

    def is_passthrough(name: str, num_layers: int) -> bool:
        return name.startswith(others) or untrained(prefix.inner(name), num_layers)

    return replace(text, shape=shape, weights=replace(text.weights, prefix=prefix, untrained=is_passthrough))
