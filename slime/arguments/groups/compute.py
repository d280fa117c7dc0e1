"""The kernels of a layer. Most of these flags say what is so anyway; Megatron-LM's scripts pass them."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.arguments.core.flag import flag, refused
from slime.arguments.core.group import ConfigGroup
from slime.config.trainers import trainer_of


@dataclass(frozen=True)
class ComputeArgs:
    """How a layer is computed."""

    transformer_impl: Literal["local", "transformer_engine"] = flag(
        "local", help="who implements the layers; transformer_engine is taken as local"
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto",
        supported=("auto", "flash", "local"),
        help="attention kernel; torch's scaled_dot_product_attention chooses it",
    )
    attention_dropout: float = refused(0.0, help="dropout of attention", wanted="0.0")
    hidden_dropout: float = refused(0.0, help="dropout of the residual stream", wanted="0.0")
    attention_softmax_in_fp32: bool | None = flag(const=True, help="softmax in float32 (always so)")
    bias_dropout_fusion: bool = flag(False, help="fuse bias and dropout; no effect without dropout")
    no_bias_dropout_fusion: bool | None = flag(const=True, help="do not fuse bias and dropout (default)")
    masked_softmax_fusion: bool = refused(False, help="fused softmax kernel")
    no_masked_softmax_fusion: bool | None = flag(const=True, help="no fused softmax kernel (default)")
    bias_swiglu_fusion: bool = refused(False, help="fuse bias and SwiGLU")
    no_bias_swiglu_fusion: bool | None = flag(const=True, help="do not fuse bias and SwiGLU (default)")
    no_persist_layer_norm: bool | None = flag(const=True, help="no persistent norm kernel (default)")
    apply_rope_fusion: bool = refused(False, help="fused rotary embedding")
    no_rope_fusion: bool | None = flag(const=True, help="no fused rotary embedding (default)")
    recompute_activations: bool = flag(False, help="the same as --recompute-granularity selective")
    gradient_accumulation_fusion: bool = refused(False, help="fuse gradient accumulation into the GEMM")
    no_gradient_accumulation_fusion: bool | None = flag(const=True, help="do not fuse it (default)")


def derive(args: Namespace) -> None:
    """Several names for one thing."""
    args.transformer_impl = "local"
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"


_MODULES = ("core_attn", "layernorm", "mlp", "moe")


def notes(args: Namespace) -> Iterator[str]:
    """Layers of somebody else's, and what belongs to a granularity that was not asked for."""
    if args.transformer_impl != "local":
        yield f"--transformer-impl {args.transformer_impl}: is taken as local, with the kernels of torch"
    if not trainer_of(args).recomputes_layers:
        return
    kind = "selective" if args.recompute_activations else args.recompute_granularity
    method = args.recompute_method
    if method is not None and kind != "full":
        yield f"--recompute-method {method}: has no effect without --recompute-granularity full"
    if args.recompute_num_layers is not None and kind is None:
        layers = args.recompute_num_layers
        yield f"--recompute-num-layers {layers}: has no effect without --recompute-granularity full"
    if args.recompute_modules and kind != "selective":
        modules = " ".join(args.recompute_modules)
        yield f"--recompute-modules {modules}: has no effect without --recompute-granularity selective"


def contradictions(args: Namespace) -> Iterator[str]:
    """Two granularities, or one that is not told what to recompute."""
    if args.recompute_activations and args.recompute_granularity != "selective":
        other = f"--recompute-granularity {args.recompute_granularity}"
        yield f"--recompute-activations and {other}: only one of them at a time"
    if not trainer_of(args).recomputes_layers:
        return
    if args.recompute_granularity == "full" and None in (args.recompute_method, args.recompute_num_layers):
        yield (
            "--recompute-granularity full: needs --recompute-method and --recompute-num-layers "
            "(uniform and 1 to compute every layer again)"
        )
    if args.recompute_granularity == "full" and args.distribute_saved_activations and args.sequence_parallel:
        yield "--distribute-saved-activations: not together with --sequence-parallel"
    if args.recompute_granularity != "selective":
        return
    if args.recompute_num_layers is not None:
        yield f"--recompute-num-layers {args.recompute_num_layers}: needs --recompute-granularity full"
    for module in args.recompute_modules or ():
        if module not in _MODULES:
            yield f"--recompute-modules {module}: not supported (wanted: {', '.join(_MODULES)})"


CONFIG_GROUP = ConfigGroup(
    {"compute": ComputeArgs}, derive=derive, notes=notes, contradictions=contradictions
)
