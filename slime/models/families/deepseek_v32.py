"""DeepSeek-V3.2: DeepSeek-V3 where each query reads only the keys that an indexer chooses for it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slime.config.model import IndexerShape, ModelConfig
from slime.models.experts import shared_products
from slime.models.families.deepseek_v3 import LATENT_WEIGHTS, latent_shape
from slime.models.family import Family
from slime.models.flops import causal_pairs, latent_forward_flops
from slime.models.hf_config import HfConfig
from slime.models.rules import LayerKind, Rule
from slime.models.shape import ModelShape, Sizes


def sparse_shape(config: HfConfig, *, interleaved: bool, heads: int) -> ModelShape:
    """DeepSeek-V3's with an indexer in each layer.

    Args:
        config: it.
        interleaved: how the family rotates the indexer's queries and keys.
        heads: of the indexer, where config.json does not say.
    """
    config.size("q_lora_rank")  # the indexer's queries come from that latent vector
    config.require(rope_interleave=True, indexer_rope_interleave=interleaved)
    shape = latent_shape(config, default_dense=3)
    assert shape.latent is not None
    width = config.size("index_head_dim", 128)
    if width < shape.latent.qk_pos_emb_head_dim:
        wanted = f"at least qk_rope_head_dim {shape.latent.qk_pos_emb_head_dim}"
        raise config.wrong("index_head_dim", width, wanted)
    indexer = IndexerShape(
        dsa_indexer_n_heads=config.size("index_n_heads", heads),
        dsa_indexer_head_dim=width,
        dsa_indexer_topk=config.size("index_topk", 2048),
        dsa_indexer_freq=(1,) * shape.num_layers,
        dsa_indexer_interleaved=interleaved,
    )
    return replace(shape, indexer=indexer)


def _shape(config: HfConfig) -> ModelShape:
    return sparse_shape(config.filled(num_key_value_heads=128), interleaved=False, heads=64)


_PARAMETERS = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}
_INDEXERS = LayerKind(
    lambda shape: shape.dsa_indexer_freq,
    {
        f"self_attention.indexer.{ours}": Rule((f"self_attn.indexer.{theirs}",))
        for ours, theirs in _PARAMETERS.items()
    },
)
SPARSE_WEIGHTS = replace(
    LATENT_WEIGHTS,
    kinds=(_INDEXERS,),
    mtp=None,  # MTP layers have indexers of their own
)


def _indexer_tensors(shape: ModelShape) -> Iterator[tuple[str, Sizes]]:
    if shape.latent is None or shape.indexer is None:
        return
    heads, width = shape.indexer.dsa_indexer_n_heads, shape.indexer.dsa_indexer_head_dim
    if shape.latent.q_lora_rank is not None:
        yield "self_attn.indexer.wq_b.weight", (heads * width, shape.latent.q_lora_rank)
    yield "self_attn.indexer.wk.weight", (width, shape.hidden_size)
    yield "self_attn.indexer.k_norm.weight", (width,)
    yield "self_attn.indexer.k_norm.bias", (width,)
    yield "self_attn.indexer.weights_proj.weight", (heads, shape.hidden_size)


_OF_INDEXER = re.compile(r"\bself_att(?:ention|n)\.indexer\.")


def is_of_indexer(name: str) -> bool:
    """Whether ``--freeze-indexer`` freezes a parameter, by megatron-core's name or Hugging Face's."""
    return _OF_INDEXER.search(name) is not None


def sparse_flops(seqlens: Sequence[int], shape: ModelConfig) -> float:
    """Counts the FLOPs of a forward pass: all keys are scored by the indexer, the chosen ones are read."""
    topk, heads = shape.dsa_indexer_topk or 0, shape.dsa_indexer_n_heads or 0
    width = heads * (shape.dsa_indexer_head_dim or 0)

    def read(length: int) -> float:
        return causal_pairs(min(length, topk)) + topk * max(0, length - topk)

    projections = (shape.q_lora_rank or 0) * width
    projections += shape.hidden_size * ((shape.dsa_indexer_head_dim or 0) + heads)
    scored = projections * sum(seqlens) + (width + heads) * sum(map(causal_pairs, seqlens))
    indexers = sum(shape.dsa_indexer_freq or ())
    return latent_forward_flops(seqlens, shape, shared_products, read) + 2 * indexers * scored


FAMILY = Family(
    shape=_shape,
    weights=SPARSE_WEIGHTS,
    layer_spec="slime_plugins.models.glm5.get_glm5_spec",
    forward_flops=sparse_flops,
    own_tensors=_indexer_tensors,
    attention="sparse attention",
    estimated=False,
)
