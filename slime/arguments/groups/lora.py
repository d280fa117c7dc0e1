"""Low-rank adapters (LoRA) on a base that does not train."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.adapters.named import first_adapters
from slime.adapters.peft_config import unlike
from slime.adapters.targets import is_named, is_target, names_module
from slime.arguments.core.flag import given, option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.lora_adapters import contradictions_of_several
from slime.arguments.groups.lora_engines import not_kept
from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER, has_checkpoint
from slime.config.lora import ALL_LINEAR, LoraConfig
from slime.config.model import ModelConfig
from slime.config.run import filled
from slime.models import FAMILIES

_PATTERNS = ("lora_target_modules", "lora_exclude_modules")
_JOINED, _NEEDED = ("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")
_OTHER_TRAINING = ("only_train_params_name_list", "freeze_params_name_list", "enable_mtp_training")


def contradictions(args: Namespace) -> Iterator[str]:
    """What trains beside adapters, what has none, and patterns that are none."""
    if not args.lora_rank:
        return
    name = f"--lora-rank {args.lora_rank}"
    for flag, _ in given(args, *_OTHER_TRAINING):
        yield f"{flag}: not with {name}, which trains adapters alone"
    if args.opd_teacher_load:
        yield f"--opd-teacher-load: not with {name} (the teacher would take the place of the base)"
    if wrong := list(_no_patterns(args)):
        yield from wrong
        return
    if args.load is not None and _is_model(args.load):
        yield (
            f"--load {args.load}: is a model, not with {name} (wanted: the base as --hf-checkpoint or "
            "--ref-load)"
        )
    yield from _layers_without(args, name)
    yield from _names_of_nothing(args)
    if args.lora_adapters:
        yield from contradictions_of_several(args)
    if not args.lora_merge:
        yield from _no_engine_has(args)


def _no_patterns(args: Namespace) -> Iterator[str]:
    for flag in _PATTERNS:
        for pattern in getattr(args, flag):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{option_string(flag)} {pattern}: no regular expression: {error}"


def _names_of_nothing(args: Namespace) -> Iterator[str]:
    """Targets that no module of the model has the name of."""
    family = FAMILIES.get(args.model_type)
    if family is None:
        return  # the FSDP trainer looks for them in the model
    names = family.weights.hf_names(filled(ModelConfig, args))
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    for flag in _PATTERNS:
        for pattern in getattr(args, flag):
            if pattern != ALL_LINEAR and not any(names_module(pattern, module) for module in modules):
                yield (
                    f"{option_string(flag)} {pattern}: no module of {args.model_type} (wanted: "
                    f"{ALL_LINEAR}, a name such as {min(modules, key=len)}, its end, or a regex of all of it)"
                )


def _no_engine_has(args: Namespace) -> Iterator[str]:
    """What engines, or updates of theirs, do not do with adapters beside the base."""
    name = "--no-lora-merge"
    wanted = {"pause_generation_mode": "abort", "update_weight_transport": "nccl"}
    for flag, value in wanted.items():
        if (found := getattr(args, flag)) != value:
            yield f"{option_string(flag)} {found}: not with {name} (wanted: {value})"
    for flag, found in given(args, "sglang_config", "prefill_num_servers"):
        yield f"{flag} {found}: not with {name}, which serves one model"
    if (expert := _adapted_expert(args)) is not None:
        yield f"{name}: not with {expert}, as engines have no adapters of experts (wanted: merged weights)"
    if args.rollout_engine == "sglang":
        yield from _not_of_sglang(args, name)


def _adapted_expert(args: Namespace) -> str | None:
    config, family = filled(LoraConfig, args), FAMILIES.get(args.model_type)
    names = set[str]() if family is None else family.weights.hf_names(filled(ModelConfig, args))
    modules = (name.removesuffix(".weight") for name in names if ".experts." in name)
    return min((each for each in modules if is_named(config, each) and is_target(config, each)), default=None)


def _not_of_sglang(args: Namespace, name: str) -> Iterator[str]:
    if (size := getattr(args, "sglang_dp_size", None) or 1) > 1:
        yield f"--sglang-dp-size {size}: not with {name}, SGLang loads no adapter while it runs (wanted: 1)"
    yield from not_kept(args, name)
    config, family = filled(LoraConfig, args), FAMILIES.get(args.model_type)
    if family is None:
        yield (
            f"{name}: not with model_type {args.model_type}, of whose layers SGLang may pass over some that "
            "have an adapter (wanted: merged weights)"
        )
        return
    names = (name.removesuffix(".weight") for name in family.weights.hf_names(filled(ModelConfig, args)))
    adapted = {module for module in names if is_target(config, module)}
    joined = {module for module in adapted if module.rpartition(".")[2] in _JOINED}
    for layer in sorted(module.rpartition(".")[0] for module in joined):
        for projection in _NEEDED:
            if f"{layer}.{projection}" not in adapted:
                yield (
                    f"--lora-target-modules {' '.join(args.lora_target_modules)}: {layer} has no adapter for "
                    f"{projection}, and SGLang passes over the others with {name} (wanted: "
                    f"{' and '.join(_NEEDED)} wherever there is one of {', '.join(_JOINED)})"
                )
                return


def _is_model(path: str) -> bool:
    return has_checkpoint(path) and not (Path(path) / CHECKPOINT_MARKER).is_file()


def _layers_without(args: Namespace, name: str) -> Iterator[str]:
    """Kinds of layers that nobody has tried adapters with."""
    if getattr(args, "linear_attention_freq", None):
        yield f"{name}: not with the gated delta nets of {args.model_type}, which have no adapters here"
    rate = args.moe_router_bias_update_rate
    if rate and getattr(args, "moe_router_enable_expert_bias", False):
        yield f"--moe-router-bias-update-rate {rate}: moves the base, not with {name} (wanted: 0)"


def missing(args: Namespace) -> Iterator[str]:
    """An adapter to start from that is another one."""
    if args.lora_rank:
        config = filled(LoraConfig, args)
        for path in first_adapters(config).values():
            for line in unlike(path, config):
                yield f"--lora-adapter-path {path}: {line}"


CONFIG_GROUP = ConfigGroup({"LoRA": LoraConfig}, contradictions=contradictions, missing=missing)
