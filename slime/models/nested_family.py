"""A language model inside a larger one, as in published checkpoints of models that read images.

Only the language model is trained and served; the tensors of the rest are carried over as they are.
"""

from collections.abc import Sequence
from dataclasses import replace

from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape
from slime.models.weight_prefix import WeightPrefix


def nested_family(
    text: Family, prefix: WeightPrefix, passthrough: Sequence[str], *, tied: bool = False
) -> Family:
    """The family of checkpoints whose ``text_config`` describes a model of the family ``text``.

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
