"""The shape of the model, under Megatron-LM's names.

Every flag of it defaults to None: the HF config gives the value, and a flag that contradicts it is an error.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import flag, option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.run_args import is_known
from slime.arguments.groups.moe import layer_kinds
from slime.arguments.validate.user_code import why_unusable
from slime.config.model import PARTS, DecoderShape, LayerVariantConfig, ModelConfig
from slime.config.rope import RotaryConfig
from slime.config.trainers import trainer_of
from slime.models import FAMILIES, HfConfigError, read_shape, shape_from_hf_config, shape_of_any
from slime.models.hf_config import HfConfig
from slime.models.shape import pad_vocab_size


@dataclass(frozen=True, kw_only=True)
class MegatronSpelling:
    """What config.json says in other words: Megatron-LM's, for what `ModelShape` has otherwise."""

    group_query_attention: bool = flag(const=True, help="fewer key-value heads than query heads")
    normalization: Literal["LayerNorm", "RMSNorm"] = flag(help="kind of norm")
    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] = flag(
        help="kind of position embedding"
    )
    use_rotary_position_embeddings: bool = flag(const=True, help="the same as position embedding rope")
    rope_type: Literal["rope", "yarn"] = flag(help="kind of rotary embedding")
    rotary_base: float = flag(above=0, help="base of rotary embeddings (rope_theta)")
    rotary_percent: float = flag(above=0, at_most=1, help="part of a head that is rotated")
    rotary_interleaved: bool = flag(const=True, help="neighbouring features of a head make a pair")
    use_rope_scaling: bool = flag(const=True, help="Llama 3's scaling of rotary frequencies")
    rope_scaling_factor: float = flag(
        names=("--rope-scaling-factor", "--rotary-scaling-factor"), above=0, help="factor of the scaling"
    )
    mscale: float | None = flag(at_least=0, help="YaRN's factor of the attention's temperature")
    mscale_all_dim: float | None = flag(at_least=0, help="the same, over all features")
    swiglu: bool = flag(const=True, help="gated MLP with SiLU")
    quick_geglu: bool = flag(const=True, help="gated MLP with x * sigmoid(1.702 x)")
    disable_bias_linear: bool | None = flag(const=True, help="no bias in linear layers")
    multi_latent_attention: bool = flag(const=True, help="DeepSeek's attention")


@dataclass(frozen=True, kw_only=True)
class ModelShapeArgs(MegatronSpelling, DecoderShape):
    """What config.json says of any decoder."""


@dataclass(frozen=True)
class VocabularyArgs:
    """Padding of the vocabulary, and the nominal length of a sequence."""

    make_vocab_size_divisible_by: int = flag(
        128, above=0, help="the vocabulary is padded to a multiple of this times TP"
    )
    padded_vocab_size: int | None = flag(above=0, help="size of the padded vocabulary; default computed")
    seq_length: int = flag(
        4096, above=0, help="nominal sequence length; batches are packed to their true lengths"
    )


@dataclass(frozen=True, kw_only=True)
class DerivedModelShape(MegatronSpelling, ModelConfig, RotaryConfig):
    """The shape as config.json has it; ``layernorm_epsilon`` is ``norm_epsilon``."""

    layernorm_epsilon: float


# What all supported families share.
_FIXED_SHAPE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}


def derive(args: Namespace) -> None:
    """Takes the model's shape from config.json; a flag that says otherwise is an error."""
    try:
        shape = _shape(args)
    except HfConfigError as error:
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint}: {error}") from error
    wrong = list(_disagreements(args, shape))
    for name, value in shape.items():
        setattr(args, name, value)
    # What of an architecture without a family nobody knows.
    for field in (*fields(ModelConfig), *fields(RotaryConfig)):
        if is_known(args, field.name):
            vars(args).setdefault(field.name, None)
    if args.group_query_attention and args.num_query_groups == args.num_attention_heads:
        wrong.append("--group-query-attention: config.json has as many key-value heads as query heads")
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    args.use_rotary_position_embeddings = True
    if args.padded_vocab_size is None:
        tp = args.tensor_model_parallel_size
        args.padded_vocab_size = pad_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, tp)
    if wrong:
        raise UsageError(*wrong, unknown=())


def _disagreements(args: Namespace, shape: Mapping[str, Any]) -> Iterator[str]:
    idle = _idle(shape)
    for name, value in shape.items():
        given = None if name in idle or not is_known(args, name) else getattr(args, name, None)
        if given is not None and not _agrees(given, value):
            shown = "" if given is True else f" {given}"  # switches have no value
            yield f"{option_string(name)}{shown}: config.json of --hf-checkpoint says {value}"


def _idle(shape: Mapping[str, Any]) -> set[str]:
    """Flags that mean nothing for a model: whatever their values are, it is the same."""
    # Latent attention has widths of its own for a head, and no projection that this bias could be of.
    names = {"kv_channels", "add_qkv_bias"} if shape.get("multi_latent_attention") else set()
    if "rope" in shape and shape["rope"].kind == "default":
        names |= {"rope_scaling_factor", "mscale", "mscale_all_dim"}
    return names


def _shape(args: Namespace) -> dict[str, Any]:
    """Returns a family's shape, or, for a trainer that takes any ``transformers`` model, what all models
    have.

    What a family does not compute is refused by either trainer; FSDP takes what only Megatron's does not.
    """
    path, any_architecture = args.hf_checkpoint, trainer_of(args).transformers_model
    if any_architecture and HfConfig.read(path).get("model_type") in FAMILIES:
        read_shape(path)
    try:
        return shape_from_hf_config(path) | _FIXED_SHAPE
    except HfConfigError:
        if not any_architecture:
            raise
        return shape_of_any(path, args.trust_remote_code)


def _agrees(given: Any, value: Any) -> bool:
    if isinstance(given, str) and isinstance(value, tuple):
        return layer_kinds(given, len(value)) == value
    if isinstance(value, float):
        return abs(float(given) - value) <= 1e-9 * max(1.0, abs(value))
    return given == value


def contradictions(args: Namespace) -> Iterator[str]:
    """A vocabulary that has no room for its tokens, a layer spec that is none."""
    if args.padded_vocab_size < args.vocab_size:
        padded, size = args.padded_vocab_size, args.vocab_size
        yield f"--padded-vocab-size {padded}: below vocab_size {size} (config.json)"
    if args.disable_bias_linear and args.add_bias_linear:
        yield "--disable-bias-linear: config.json of --hf-checkpoint describes a model with biases"
    if args.spec is not None and len(args.spec) != 2:
        yield f"--spec {' '.join(args.spec)}: wanted a module and the name of a function in it"


def unusable(args: Namespace) -> Iterator[str]:
    """A layer spec that is not there."""
    if args.spec is None:
        return
    if reason := why_unusable(".".join(args.spec)):
        yield f"--spec {' '.join(args.spec)}: {reason}"


CONFIG_GROUP = ConfigGroup(
    {
        "model shape": ModelShapeArgs,
        **dict(PARTS.values()),
        "layer variants": LayerVariantConfig,
        "vocabulary": VocabularyArgs,
    },
    derived=DerivedModelShape,
    derive=derive,
    contradictions=contradictions,
    unusable=unusable,
)
