"""A ``transformers`` causal language model of this rank, sharded by FSDP2."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.initialization import no_init_weights

from slime.backends.fsdp_utils.lora import Adapter, attach_adapters
from slime.backends.fsdp_utils.value_head import add_value_head
from slime.config.backend import BackendConfig
from slime.config.experts import ExpertConfig
from slime.config.precision import PrecisionConfig
from slime.config.trainer import TrainerConfig
from slime.models import FAMILIES, read_shape
from slime.models.checkpoint.quantization import KEYS
from slime.models.chosen_keys import choose_first_of_equals
from slime.models.families.deepseek_v32 import is_of_indexer
from slime.models.hf_config import HfConfig
from slime.models.rules import WeightMap
from slime.models.weight_prefix import WeightPrefix

_EXPERT_BIAS = re.compile(r"(e_score_correction|expert)_bias$")


def build_model(config: BackendConfig, mesh: DeviceMesh, role: str = "actor") -> PreTrainedModel:
    """The model that ``--hf-checkpoint`` describes, in float32 and sharded, its weights not yet set.

    A critic has a value head in the place of the output layer, which is new and always trains, and no
    adapters (``--lora-rank``).

    Raises:
        ValueError: gradient checkpointing, freezing, adapters or a value head that the model does not offer,
            or biases of experts that should move.
    """
    model = empty_model(config.hf_checkpoint.hf_checkpoint, config.hf_checkpoint.trust_remote_code)
    require_fixed_biases(config.experts, model)
    freeze(config.trainer, model)
    if role == "critic":
        add_value_head(model, config.trainer.seed)
    elif config.lora.adapts:
        attach_adapters(model, config.lora, config.trainer.seed)
    if config.fsdp.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"--gradient-checkpointing: {type(model).__name__} does not offer it")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_fsdp2(model, mesh, config.precision, cpu_offload=config.fsdp.fsdp_cpu_offload)
    return model


def empty_model(path: str | Path, trust_remote_code: bool) -> PreTrainedModel:
    """The whole model of a Hugging Face directory on the host, in memory that is reserved and not touched."""
    weights = _weight_map(path)
    config = plain_config(path, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, "attn_implementation": "eager"}
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    model.tie_weights()
    choose_first_of_equals(model)
    # How to give weights back the names of checkpoints; transformers finds it by classes, which FSDP changes.
    as_stored = weights is not None and weights.experts is not None and weights.experts.stacked
    model._weight_conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not (as_stored or isinstance(conversion, PrefixChange))
    ]
    model._weight_prefix = weights.prefix if weights is not None else WeightPrefix()
    return model


def _weight_map(path: str | Path) -> WeightMap | None:
    """Returns the weight map of the model's family, if it has one."""
    family = FAMILIES.get(HfConfig.read(path).get("model_type"))
    return None if family is None else family.weights


def plain_config(path: str | Path, trust_remote_code: bool) -> PretrainedConfig:
    """Returns the config of a directory's language model, for weights that are not quantised, and without
    dropout.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if (weights := _weight_map(path)) is not None and weights.prefix != WeightPrefix():
        config = config.get_text_config()
        config.tie_word_embeddings = not read_shape(path).untie_embeddings_and_output_weights
    for name in KEYS:
        vars(config).pop(name, None)
    _drop_dropout(config)
    return config


def _drop_dropout(config: PretrainedConfig) -> None:
    """Old and new log-probs have to be of the same network."""
    for name, value in list(vars(config).items()):
        if re.search("dropout|pdrop|layerdrop", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache = False


def prepare_for_gradients(model: torch.nn.Module) -> None:
    """Lets the model compute as it does for log-probs: what only training has is left to chance.

    Some route by noisy inputs then, or by lot, and not all of that is a number in their configs. Only what
    computes its layers again in the backward pass has to know that it trains, and adapters, whose dropout is
    of a flag.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, Adapter) or getattr(module, "gradient_checkpointing", False):
            module.training = True


def apply_fsdp2(
    model: PreTrainedModel, mesh: DeviceMesh, precision: PrecisionConfig, cpu_offload: bool
) -> PreTrainedModel:
    """Shards the layers one by one, then the rest; parameters are gathered in ``params_dtype`` for use.

    Everything is freed after use, of the rest too: what is gathered would outlive a change of the shards.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": True,
        "mp_policy": _precision(precision),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for module in (*_units(model), model):
        sharded = fully_shard(module, **options)
        # Sums that are divided afterwards: gloo has no averages.
        sharded.set_force_sum_reduction_for_comms(True)
    # A rank may not have used all of its experts.
    sharded.set_reduce_scatter_unused_params(True)
    return model


def _precision(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    dtype = precision.params_dtype
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    reduce = dtype if precision.grad_reduce_in_bf16 else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)


def _units(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The outermost layers, and embeddings that share their weight with nothing."""
    names = set(model._no_split_modules or ())
    tied = model.config.get_text_config().tie_word_embeddings
    units: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        wanted = type(module).__name__ in names or (isinstance(module, torch.nn.Embedding) and not tied)
        if wanted and not any(path.startswith(f"{outer}.") for outer in units):
            units[path] = module
    return list(units.values())


def require_fixed_biases(experts: ExpertConfig, model: torch.nn.Module) -> None:
    """Refuses to leave biases alone that ``--moe-router-bias-update-rate`` moves, in any architecture."""
    rate = experts.moe_router_bias_update_rate
    tensors = (name for pairs in (model.named_parameters(), model.named_buffers()) for name, _ in pairs)
    name = next(filter(_EXPERT_BIAS.search, tensors), None)
    if rate and name is not None:
        raise ValueError(
            f"--moe-router-bias-update-rate {rate}: not supported with --train-backend fsdp, which leaves "
            f"{name} alone (wanted: 0)"
        )


def freeze(config: TrainerConfig, model: torch.nn.Module) -> None:
    """Freezes by regular expressions over the parameters' Hugging Face names (``re.search``), and indexers.

    Raises:
        ValueError: a pattern matches nothing, or nothing trains.
    """
    only, frozen = config.only_train_params_name_list, config.freeze_params_name_list
    patterns: Sequence[str] = only or frozen or ()
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    params = dict(model.named_parameters())
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in params):
            raise ValueError(
                f"{flag} {pattern!r}: matches no parameter (wanted: a regular expression for names such as "
                f"{next(iter(params))})"
            )
    for name, param in params.items():
        matched = any(re.search(pattern, name) for pattern in patterns)
        param.requires_grad = matched == bool(only) if patterns else True
        if config.freeze_indexer and is_of_indexer(name):
            param.requires_grad = False
    if not any(param.requires_grad for param in params.values()):
        raise ValueError(f"{flag} {' '.join(map(repr, patterns))}: leaves no parameter to train")


def is_hf_checkpoint(path: str | Path | None) -> bool:
    """Whether ``path`` is a Hugging Face directory with safetensors files, of any family."""
    return (
        path is not None and (Path(path) / "config.json").is_file() and any(Path(path).glob("*.safetensors"))
    )
