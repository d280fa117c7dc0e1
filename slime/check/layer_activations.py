"""What one layer keeps for its backward pass, in bytes per token of a rank.

The terms follow the forward passes of megatron-core's layer with our norms, attention and experts
(``slime/backends/megatron_utils``): a tensor counts if the gradient of some operation reads it, and once
however many do. What all layers share (angles, masks) is left out. Those of a gated delta net follow
``slime_plugins/models/gated_delta_net.py`` and, in plain torch, ``delta_rule.py``: the kernels of
flash-linear-attention keep less.
"""

from dataclasses import dataclass, fields, replace

from slime.check.kernels import Kernels
from slime.check.layout import Layout
from slime.config.memory import MemoryConfig
from slime.config.model import ModelConfig
from slime.models.linear_attention import DeltaNetSizes

_FLOAT32, _INDEX = 4, 8
_CHUNK = 64  # tokens of a step of the delta rule


@dataclass(frozen=True)
class Saved:
    """Bytes per token of a rank.

    Attributes:
        inputs: of all norms on the residual stream; the first one is the layer's own input.
        normed: what the norms before attention and MLP give.
        projected: what queries, keys and values are made of.
        core: what attention itself keeps; ``core_inputs`` is what it is computed from again.
        output: of attention.
        mlp: of a dense MLP, or of router and experts.
    """

    inputs: float
    normed: float
    projected: float
    core: float
    core_inputs: float
    output: float
    mlp: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self)) - self.core_inputs


@dataclass(frozen=True)
class Rank:
    """What the terms have in common.

    Attributes:
        size: bytes of an element.
        share: part of the tokens that sequence parallelism leaves a rank outside of attention and MLP.
        longest: tokens of the longest segment, those of all context-parallel ranks.
    """

    config: MemoryConfig
    layout: Layout
    kernels: Kernels
    longest: int

    @property
    def size(self) -> int:
        return self.config.precision.params_dtype.itemsize

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def share(self) -> float:
        return 1 / self.layout.tp if self.config.megatron.sequence_parallel else 1.0


def saved_by_layer(rank: Rank, layer: int) -> Saved:
    """Everything that a layer keeps without recomputation."""
    model = rank.model
    norms = 2 + int(model.post_self_attn_layernorm) + int(model.post_mlp_layernorm)
    projected, core, core_inputs, output = _attention(rank, layer)
    experts = bool(model.num_experts and model.moe_layer_freq[layer])
    return Saved(
        inputs=norms * rank.share * _norm_input(rank),
        normed=2 * rank.share * model.hidden_size * rank.size,
        projected=projected,
        core=core,
        core_inputs=core_inputs,
        output=output,
        mlp=_experts(rank) if experts else _mlp(rank, model.ffn_hidden_size),
    )


def _attention(rank: Rank, layer: int) -> tuple[float, float, float, float]:
    """(projected, core, core_inputs, output); ``core_inputs`` is all of it if it is never computed again."""
    model, layout = rank.model, rank.layout
    if model.kv_lora_rank is not None:
        return _latent(rank)
    if model.linear_attention_freq and model.linear_attention_freq[layer]:
        projected, core, output = delta_net(
            model, rank.kernels, rank.size, layout.tp, layout.cp, rank.longest
        )
        return projected, core, core, output
    return _grouped(rank)


def recomputed(rank: Rank, saved: Saved, experts: bool) -> Saved:
    """What is left of it with ``--recompute-granularity selective``."""
    modules = rank.config.megatron.recompute_modules or ["core_attn"]
    if "core_attn" in modules:
        saved = replace(saved, core=saved.core_inputs)
    if "layernorm" in modules:
        hidden = rank.model.hidden_size * rank.size
        spared = 2 * rank.share * (_norm_input(rank) - hidden)
        saved = replace(saved, inputs=saved.inputs - spared, normed=0)
    if ("moe" if experts else "mlp") in modules:
        saved = replace(saved, mlp=0)
    return saved


def angles(rank: Rank) -> float:
    """Cosines and sines, which all layers share."""
    model, rotary = rank.model, rank.config.rotary
    latent = model.kv_lora_rank is not None
    rotated = rotary.rope.percent if rotary.rope else 1
    width = model.qk_pos_emb_head_dim if latent else int(model.kv_channels * rotated)
    return float(2 * width * rank.size * (2 if rotary.local_rope else 1))


def _norm_input(rank: Rank) -> float:
    """Counts the input of a norm on the residual stream."""
    hidden = rank.model.hidden_size
    if rank.model.layernorm_zero_centered_gamma:
        # Computed in float32: a copy of the input, and what is multiplied by 1 + weight.
        return 2 * hidden * _FLOAT32 + rank.kernels.norm(1, 0, _FLOAT32)
    return hidden * rank.size + rank.kernels.norm(1, hidden, rank.size)


def _grouped(rank: Rank) -> tuple[float, float, float, float]:
    """Attention with query groups: (projected, core, core_inputs, output)."""
    model, size, tp = rank.model, rank.size, rank.layout.tp
    heads, groups, width = (
        model.num_attention_heads // tp,
        max(1, model.num_query_groups // tp),
        model.kv_channels,
    )
    queries, keys = heads * width * size, groups * width * size
    gates = queries if model.attention_output_gate else 0
    row = queries + gates + 2 * keys  # query, key and value of a token lie together
    if model.num_query_groups < tp:  # each rank has those of all
        row *= tp
    copied = queries if groups > 1 and not model.qk_norm_over_heads else 0
    if rank.model.softmax_type != "vanilla":
        return 0.0, _with_sinks(rank, heads), copied + row, queries
    has_norm = model.qk_layernorm
    projected = row if has_norm or not rank.kernels.pads_values else 0.0
    core = queries + keys + rank.kernels.attention(heads)
    if rank.kernels.pads_values:
        core += keys
    core_inputs = queries + keys if has_norm else (copied if projected else copied + row)
    if has_norm:
        projected += copied + _head_norms(rank, heads, groups)
    # The gate's sigmoid in float32, and what it weighs.
    weighed = heads * width * _FLOAT32 + queries if gates else 0
    return projected + weighed, core, core_inputs, queries


def _with_sinks(rank: Rank, heads: int) -> float:
    """Queries, keys and values of all heads, and the weights of all pairs: there is no kernel for it."""
    pairs = _FLOAT32 * (rank.longest + 1)
    if rank.size != _FLOAT32:
        pairs += rank.size * rank.longest
    return heads * (3 * rank.model.kv_channels * rank.size + pairs)


def _head_norms(rank: Rank, heads: int, groups: int) -> float:
    """Beside the inputs of the norms of queries and keys."""
    features = (heads + groups) * rank.model.kv_channels
    if rank.model.qk_norm_over_heads:
        # Copies of them in float32, and the normed ones before they are multiplied by the weights.
        return features * (_FLOAT32 + rank.size)
    if rank.model.layernorm_zero_centered_gamma:
        copies = 2 if rank.size != _FLOAT32 else 1
        return copies * features * _FLOAT32 + rank.kernels.norm(heads + groups, 0, _FLOAT32)
    return rank.kernels.norm(heads + groups, features, rank.size)


def _latent(rank: Rank) -> tuple[float, float, float, float]:
    """Counts the activations of multi-latent attention."""
    model, size, kernels = rank.model, rank.size, rank.kernels
    heads = model.num_attention_heads // rank.layout.tp
    score = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) * size
    value = heads * model.v_head_dim * size
    latents = [(model.kv_lora_rank, model.kv_lora_rank + model.qk_pos_emb_head_dim)]
    if model.q_lora_rank is not None:
        latents.append((model.q_lora_rank, model.q_lora_rank))
    projected = 0.0
    for normed, given in latents:
        projected += rank.share * ((given + normed) * size + kernels.norm(1, normed, size))
    core = 2 * score + kernels.attention(heads)
    if kernels.pads_values:
        core += 2 * score
    else:
        projected += value
    core_inputs = 2 * score + (value if kernels.pads_values else 0)
    return projected, core, core_inputs, value


def _mlp(rank: Rank, width: int) -> float:
    """Gate and up, the activated gate, up with an offset of 0, and the product that down is computed from."""
    parts = 3 if rank.config.megatron.bias_activation_fusion else 5
    return parts * width // rank.layout.tp * rank.size


def _experts(rank: Rank) -> float:
    """Router, the experts of a token, shared ones; tokens are taken to be spread evenly over experts."""
    model, size, layout = rank.model, rank.size, rank.layout
    routed = rank.share * layout.etp * model.moe_router_topk
    parts = 4 if rank.config.megatron.bias_activation_fusion else 6  # the last one is weighed by the router
    if model.activation_func_clamp_value is not None:
        parts += 2  # the clamped gate, and the sigmoid in its activation
    of_expert = model.hidden_size * size + parts * model.moe_ffn_hidden_size // layout.etp * size
    router = rank.share * model.num_experts * (4 * _FLOAT32 + 3)
    shared = model.moe_shared_expert_intermediate_size
    of_shared = _mlp(rank, shared) if shared else 0.0
    if shared and model.moe_shared_expert_gate:
        of_shared += rank.share * (model.hidden_size + 1) * size
    return routed * (of_expert + 2 * _INDEX + size) + router + of_shared


def delta_net(
    model: ModelConfig, kernels: Kernels, size: int, tp: int, cp: int, longest: int
) -> tuple[float, float, float]:
    """(projections and gates, the rule itself, what the output is projected from).

    Args:
        kernels: of the device.
        size: bytes of an element.
        tp, cp: ranks that share heads, and tokens; the rule is computed for the tokens of all of the latter.
        longest: tokens of a segment.
    """
    sizes = DeltaNetSizes.of(model)
    keys, heads = sizes.key_heads // tp, sizes.key_heads * sizes.ratio // tp
    projected = _convolved(sizes, keys, heads, size) + (2 * _FLOAT32 + size) * heads
    values = heads * sizes.value
    gate = _FLOAT32 * values
    if size == _FLOAT32 and keys == 1:
        gate = size * sizes.projected // tp  # no copy, but a view of all that was projected
    # The rule's output, normed, times the weight; the gate and its silu, both in float32.
    normed = _FLOAT32 * values + kernels.norm(heads, 0, _FLOAT32) + 2 * size * values
    gates = normed + gate + _FLOAT32 * values
    return cp * projected + gates, cp * _rule(sizes, heads, longest), size * values


def _convolved(sizes: DeltaNetSizes, keys: int, heads: int, size: int) -> float:
    """Input and output of the convolution with their places, and queries and keys with their lengths."""
    features = keys * 2 * sizes.key + heads * sizes.value
    wide = features * size if size == _FLOAT32 else 2 * keys * sizes.key * _FLOAT32
    return 2 * features * size + 2 * _INDEX + wide + 2 * keys * _FLOAT32


def _rule(sizes: DeltaNetSizes, heads: int, longest: int) -> float:
    """Counts the activations of the chunked rule, all in float32.

    Matrix products copy what is not in their order.
    """
    size = min(_CHUNK, longest)
    chunks = -(-longest // size)
    # Queries: copied for a product, scaled by the decay; keys: times the strength, copied, and so on. What
    # the last chunk writes into a state is read by nobody.
    of_keys = 9 + (chunks - 1) / chunks
    pairs = (
        5  # decay, what solves the writes (before and after it), what tokens read within a chunk (likewise)
    )
    elements = of_keys * sizes.key + 3 * sizes.value + pairs * size + 4
    return _FLOAT32 * heads * (elements + sizes.key * sizes.value / size)
