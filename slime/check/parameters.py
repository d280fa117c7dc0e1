"""The parameters of each pipeline stage: their names, and how many elements a rank has of them.

The names are those of the family's `WeightMap`; `SIZES` knows how large the parameter of each name is.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from slime.arguments.core.run_args import copied
from slime.check.layout import Layout, layout_of
from slime.config.model import ModelConfig
from slime.models import family_of
from slime.models.linear_attention import DeltaNetSizes
from slime.models.mtp import trained_mtp_layers
from slime.models.rules import WeightMap

Kind = Literal["embedding", "dense", "experts"]


@dataclass(frozen=True)
class Parameter:
    """``count`` parameters of one size, the first one being ``name``; a rank has ``elements`` of each."""

    name: str
    kind: Kind
    elements: int
    count: int = 1


@dataclass(frozen=True)
class Size:
    """Elements of a whole parameter, and whether tensor-parallel ranks share it or have it whole."""

    elements: Callable[[Namespace], int]
    split: bool = True


def _heads(args: Namespace) -> int:
    return int(args.num_attention_heads * args.kv_channels)


def _score_width(args: Namespace) -> int:
    """Returns the width of the queries of all heads of latent attention."""
    return int(args.num_attention_heads * (args.qk_head_dim + args.qk_pos_emb_head_dim))


def _qkv(args: Namespace) -> int:
    heads = args.num_attention_heads * (2 if args.attention_output_gate else 1)
    return int((heads + 2 * args.num_query_groups) * args.kv_channels)


def _hidden(args: Namespace) -> int:
    return int(args.hidden_size)


def _vocabulary(args: Namespace) -> int:
    return int(args.padded_vocab_size * args.hidden_size)


def _norm(of_latent: str, heads: str) -> Callable[[Namespace], int]:
    """Counts a norm of queries or keys: of a latent vector, of all heads or of one head."""

    def elements(args: Namespace) -> int:
        if args.multi_latent_attention:
            return int(getattr(args, of_latent))
        return int(args.kv_channels * (getattr(args, heads) if args.qk_norm_over_heads else 1))

    return elements


def _delta_net(args: Namespace) -> DeltaNetSizes:
    return DeltaNetSizes.of(cast(ModelConfig, args))


def _values(args: Namespace) -> int:
    """Returns the width of the values of all heads of a gated delta net."""
    return int(args.linear_num_value_heads * args.linear_value_head_dim)


SIZES: dict[str, Size] = {
    "embedding.word_embeddings.weight": Size(_vocabulary),
    "output_layer.weight": Size(_vocabulary),
    "decoder.final_layernorm.weight": Size(_hidden, split=False),
    "enorm.weight": Size(_hidden, split=False),
    "hnorm.weight": Size(_hidden, split=False),
    "eh_proj.weight": Size(lambda args: 2 * _hidden(args) ** 2),
    "final_layernorm.weight": Size(_hidden, split=False),
    "input_layernorm.weight": Size(_hidden, split=False),
    "pre_mlp_layernorm.weight": Size(_hidden, split=False),
    "post_self_attn_layernorm.weight": Size(_hidden, split=False),
    "post_mlp_layernorm.weight": Size(_hidden, split=False),
    "self_attention.linear_qkv.weight": Size(lambda args: _qkv(args) * _hidden(args)),
    "self_attention.linear_qkv.bias": Size(_qkv),
    "self_attention.linear_proj.weight": Size(lambda args: _heads(args) * _hidden(args)),
    "self_attention.linear_proj.bias": Size(_hidden, split=False),
    "self_attention.core_attention.softmax_offset": Size(lambda args: int(args.num_attention_heads)),
    "self_attention.in_proj.weight": Size(lambda args: _delta_net(args).projected * _hidden(args)),
    "self_attention.conv1d.weight": Size(
        lambda args: _delta_net(args).mixed * int(args.linear_conv_kernel_dim)
    ),
    "self_attention.A_log": Size(lambda args: int(args.linear_num_value_heads)),
    "self_attention.dt_bias": Size(lambda args: int(args.linear_num_value_heads)),
    "self_attention.out_norm.weight": Size(lambda args: int(args.linear_value_head_dim), split=False),
    "self_attention.out_proj.weight": Size(lambda args: _values(args) * _hidden(args)),
    "self_attention.linear_q_proj.weight": Size(lambda args: _score_width(args) * _hidden(args)),
    "self_attention.linear_q_down_proj.weight": Size(
        lambda args: int(args.q_lora_rank * args.hidden_size), split=False
    ),
    "self_attention.linear_q_up_proj.weight": Size(lambda args: int(_score_width(args) * args.q_lora_rank)),
    "self_attention.linear_kv_down_proj.weight": Size(
        lambda args: int((args.kv_lora_rank + args.qk_pos_emb_head_dim) * args.hidden_size), split=False
    ),
    "self_attention.linear_kv_up_proj.weight": Size(
        lambda args: int(args.num_attention_heads * (args.qk_head_dim + args.v_head_dim) * args.kv_lora_rank)
    ),
    "self_attention.indexer.linear_wq_b.weight": Size(
        lambda args: int(args.q_lora_rank * args.dsa_indexer_n_heads * args.dsa_indexer_head_dim), split=False
    ),
    "self_attention.indexer.linear_wk.weight": Size(
        lambda args: int(args.hidden_size * args.dsa_indexer_head_dim), split=False
    ),
    "self_attention.indexer.k_norm.weight": Size(lambda args: int(args.dsa_indexer_head_dim), split=False),
    "self_attention.indexer.k_norm.bias": Size(lambda args: int(args.dsa_indexer_head_dim), split=False),
    "self_attention.indexer.linear_weights_proj.weight": Size(
        lambda args: int(args.hidden_size * args.dsa_indexer_n_heads), split=False
    ),
    "self_attention.kv_layernorm.weight": Size(lambda args: int(args.kv_lora_rank), split=False),
    "mlp.linear_fc1.weight": Size(lambda args: int(2 * args.ffn_hidden_size * args.hidden_size)),
    "mlp.linear_fc2.weight": Size(lambda args: int(args.ffn_hidden_size * args.hidden_size)),
    "mlp.router.weight": Size(lambda args: int(args.num_experts * args.hidden_size), split=False),
    "mlp.router.bias": Size(lambda args: int(args.num_experts), split=False),
    "mlp.shared_experts.linear_fc1.weight": Size(
        lambda args: int(2 * args.moe_shared_expert_intermediate_size * args.hidden_size)
    ),
    "mlp.shared_experts.linear_fc2.weight": Size(
        lambda args: int(args.moe_shared_expert_intermediate_size * args.hidden_size)
    ),
    "mlp.shared_experts.gate_weight": Size(_hidden, split=False),
}
"""Sizes of the parameters that no expert has, by their names within a layer or the model."""
_NORMS_OF_HEADS = {
    "self_attention.q_layernorm.weight": _norm("q_lora_rank", "num_attention_heads"),
    "self_attention.k_layernorm.weight": _norm("kv_lora_rank", "num_query_groups"),
}
OF_EXPERT: dict[str, Callable[[Namespace], int]] = {
    "linear_fc1.bias": lambda args: int(2 * args.moe_ffn_hidden_size),
    "linear_fc2.bias": _hidden,
    "linear_fc1.weight": lambda args: int(2 * args.moe_ffn_hidden_size * args.hidden_size),
    "linear_fc2.weight": lambda args: int(args.moe_ffn_hidden_size * args.hidden_size),
}
"""Sizes of the parameters of one expert, which expert-tensor-parallel ranks share."""
BUFFERS = frozenset({"mlp.router.expert_bias"})
"""What is in checkpoints and no parameter."""
_EMBEDDING, _HEAD, _FINAL_NORM = (
    *("embedding.word_embeddings.weight", "output_layer.weight"),
    "decoder.final_layernorm.weight",
)


def size_of(args: Namespace, name: str, tp: int) -> int:
    """Elements that a rank has of a parameter that no expert has.

    Raises:
        KeyError: no size is known; `SIZES` wants a row.
    """
    if name in _NORMS_OF_HEADS:
        split = not args.multi_latent_attention and args.qk_norm_over_heads
        return _NORMS_OF_HEADS[name](args) // (tp if split else 1)
    size = SIZES[name]
    return size.elements(args) // (tp if size.split else 1)


def stage_parameters(
    args: Namespace, layout: Layout, stage: int, role: str = "actor"
) -> list[list[Parameter]]:
    """Counts the parameters of each model chunk of a rank of this stage."""
    chunks = layout.stages[stage]
    return [
        list(
            _chunk(
                args,
                layout,
                layers,
                first=stage == 0 and number == 0,
                last=stage == layout.pp - 1 and number == len(chunks) - 1,
                critic=role == "critic",
            )
        )
        for number, layers in enumerate(chunks)
    ]


def _chunk(
    args: Namespace, layout: Layout, layers: range, *, first: bool, last: bool, critic: bool
) -> Iterator[Parameter]:
    weights = family_of(args.model_type).weights
    if first:
        yield Parameter(_EMBEDDING, "embedding", size_of(args, _EMBEDDING, layout.tp))
    for layer in layers:
        yield from _layer(args, layout, weights, layer)
    if not last:
        return
    yield Parameter(_FINAL_NORM, "dense", size_of(args, _FINAL_NORM, layout.tp))
    if critic:
        yield Parameter(_HEAD, "dense", args.hidden_size)
        yield Parameter("output_layer.bias", "dense", 1)
        return
    if args.untie_embeddings_and_output_weights or not first:
        # On another stage than the embedding a tied head is a copy of it.
        yield Parameter(_HEAD, "embedding", size_of(args, _HEAD, layout.tp))
    further = trained_mtp_layers(args)
    for name in weights.mtp.names(further, ()) if weights.mtp else ():
        yield Parameter(name, "dense", size_of(args, name.split(".", 3)[3], layout.tp))
    for number in range(further):
        kind = args.num_layers - 1  # as the decoder's last one
        yield from _layer(args, layout, weights, kind, f"mtp.layers.{number}.transformer_layer.")


def _layer(
    args: Namespace, layout: Layout, weights: WeightMap, layer: int, prefix: str = ""
) -> Iterator[Parameter]:
    prefix, experts = prefix or f"decoder.layers.{layer}.", weights.experts
    names = weights.names_beside_experts(cast(ModelConfig, args), layer)
    if experts is not None and args.moe_layer_freq[layer]:
        names = [name for name in names if not name.startswith("mlp.")] + [*experts.of_layer]
        for name in experts.of_expert:
            elements = OF_EXPERT[name](args) // layout.etp
            whole = f"{prefix}mlp.experts.local_experts.0.{name}"
            yield Parameter(whole, "experts", elements, args.num_experts // layout.ep)
    absent = {*weights.absent(cast(ModelConfig, args)), *BUFFERS}
    for name in names:
        if name not in absent:
            yield Parameter(prefix + name, "dense", size_of(args, name, layout.tp))


def counted(parameters: Iterable[Parameter]) -> dict[Kind, int]:
    """Elements of each kind."""
    kinds: tuple[Kind, ...] = ("embedding", "dense", "experts")
    every = list(parameters)
    return {kind: sum(p.elements * p.count for p in every if p.kind == kind) for kind in kinds}


def whole_model(args: Namespace, role: str = "actor") -> dict[Kind, int]:
    """Elements of the model as published: on one rank, its vocabulary not padded."""
    alone = dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "trainer_world_size"),
        ),
        1,
    )
    none = dict.fromkeys(
        (
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            "virtual_pipeline_model_parallel_size",
        )
    )
    one = copied(args, **{**alone, **none, "padded_vocab_size": args.vocab_size})
    return counted(p for chunk in stage_parameters(one, layout_of(one), 0, role) for p in chunk)
