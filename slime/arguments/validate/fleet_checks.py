"""What is wrong with the served models of a run, one line each."""

import argparse
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.arguments.core.flag import flags_of
from slime.arguments.core.values import has_range, why_bad
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.arguments.validate.checkpoint_files import bad_values
from slime.arguments.validate.served_models import DEFAULT, PLACEHOLDER, ModelConfig, ServerGroupConfig
from slime.config.engines import CROWDED
from slime.config.lora import LoraConfig
from slime.config.run import filled
from slime.models import HfConfigError, read_shape
from slime.models.checkpoint.inspection import weight_names
from slime.models.hf_config import HfConfig
from slime.utils.hardware import has_gpu

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS = ("api_key", "admin_api_key")
_SHAPE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
"""Fields of config.json that decide the names and sizes of the weights."""


def bad_models(args: Namespace) -> Iterator[str]:
    """GPUs that do not add up, kinds that do not go together, and a first model that cannot train."""
    models = args.served_models
    for model in models:
        yield from _bad_model(args, model)
    yield from _bad_of_policy(args)
    total, found = args.rollout_num_gpus, sum(model.total_num_gpus for model in models)
    if found != total:
        yield f"--sglang-config: its groups have {found} GPUs in all (wanted: --rollout-num-gpus {total})"
    if any(model.name == DEFAULT for model in models[1:]):
        yield f"--sglang-config: model {DEFAULT} is not the first (wanted: it first, or under another name)"
    if models and not (models[0].update_weights or args.debug_rollout_only):
        yield (
            f"--sglang-config: model {models[0].name} comes first and takes no updates, but it is the first "
            "that answers the prompts (wanted: the trained model first)"
        )


def _bad_of_policy(args: Namespace) -> Iterator[str]:
    """What the models of one of several policies cannot be."""
    models = args.served_models if args.policy_name else ()
    if models and models[0].name != args.policy_name:
        yield (
            f"--sglang-config {args.sglang_config}: model {models[0].name} comes first, and the first one is "
            f"trained (wanted: {args.policy_name}; each policy has a file of its own, in its entry of "
            "--policies)"
        )
    for model in models:
        if model.has_pd_disaggregation:
            yield (
                f"--sglang-config {args.sglang_config}: model {model.name}: prefill and decode engines: not "
                "with --policies (wanted: worker_type regular)"
            )


def _bad_model(args: Namespace, model: ModelConfig) -> Iterator[str]:
    kinds = {group.worker_type for group in model.server_groups} - {PLACEHOLDER}
    where = f"{_origin(args)}: model {model.name}"
    if not _NAME.fullmatch(model.name):
        yield f"{where}: not a name (wanted: letters, digits, dots, dashes)"
    if not kinds:
        yield f"{where}: has no engines, only placeholders"
    if "encoder" in kinds:
        yield f"{where}: worker_type encoder: not supported (wanted: without, rollouts send text only)"
    if args.rollout_engine == "embedded" and (split := sorted(kinds - {"regular", "encoder"})):
        yield (
            f"{where}: worker_type {split[0]}: the embedded engine prefills and decodes in one process "
            "(wanted: regular, or SGLang)"
        )
    if model.has_pd_disaggregation and kinds != {"prefill", "decode"}:
        yield f"{where}: has {' and '.join(sorted(kinds))} engines (wanted: prefill and decode, or regular)"
    if model.has_pd_disaggregation and args.colocate and args.offload_rollout:
        yield f"{where}: prefill and decode engines cannot release their memory (wanted: without --colocate)"
    yield from _bad_interval(args, where, model)
    for number, group in enumerate(model.server_groups, 1):
        if group.worker_type != PLACEHOLDER:
            yield from _bad_group(args, f"{where}: group {number}", group)


def _bad_interval(args: Namespace, where: str, model: ModelConfig) -> Iterator[str]:
    """What a model that keeps an earlier version of the weights cannot be, and ways that do not reach it."""
    if model.update_interval is None:
        return
    where = f"{where}: update_interval {model.update_interval}"
    if not model.update_weights:
        yield f"{where}: it takes no updates (wanted: update_weights: true, or no update_interval)"
    elif model is args.served_models[0]:
        yield f"{where}: it comes first, and the first one is trained (wanted: another model first)"
    if args.update_weight_mode == "delta":
        yield f"{where}: with --update-weight-mode delta, which each engine takes part in (wanted: full)"
    if filled(LoraConfig, args).serves_adapter:
        yield f"{where}: with --no-lora-merge, which sends adapters alone (wanted: without)"


def _bad_group(args: Namespace, where: str, group: ServerGroupConfig) -> Iterator[str]:
    size, per_node = group.size, args.num_gpus_per_node
    if args.sglang_config is None and args.prefill_num_servers is None:
        where, total, each = "--rollout-num-gpus", "", "--rollout-num-gpus-per-engine"
        where = f"{where} {group.num_gpus}"
    else:
        total, each = f": num_gpus {group.num_gpus}", "num_gpus_per_engine"
    if group.num_gpus % size:
        yield f"{where}{total}: not a multiple of {each} {size}"
    if args.rollout_engine == "embedded" and size > (most := 1 if has_gpu() else per_node):
        takes = "one GPU" if has_gpu() else "those of one node"
        yield f"{_of_size(where, each, size)}: the embedded engine takes {takes} (wanted: at most {most})"
    elif size > per_node and size % per_node:
        yield (
            f"{_of_size(where, each, size)}: takes a part of its last node "
            f"(wanted: a multiple of --num-gpus-per-node {per_node}, or at most that)"
        )


def bad_spares(args: Namespace) -> Iterator[str]:
    """Spare GPUs on which no engine of the first model could start while the run goes on."""
    spare = args.rollout_spare_gpus
    if not spare or args.debug_train_only:
        return
    where = f"--rollout-spare-gpus {spare}"
    if args.colocate:
        yield f"{where}: with --colocate, where engines come and go with the trainer (wanted: without)"
    if args.rollout_external:
        yield f"{where}: the engines are somebody else's (wanted: engines of the run)"
    for model in args.served_models[:1]:
        size = next((g.size for g in model.server_groups if g.worker_type != PLACEHOLDER), 1)
        if model.has_pd_disaggregation:
            yield f"{where}: model {model.name} has prefill and decode engines (wanted: regular ones)"
        elif spare % size:
            yield f"{where}: not a multiple of the {size} GPUs of an engine of model {model.name}"


def bad_scaling(args: Namespace) -> Iterator[str]:
    """Engines that are to come and go by their requests where they cannot."""
    if args.rollout_queue_per_engine is None or args.debug_train_only:
        return
    where = f"--rollout-queue-per-engine {args.rollout_queue_per_engine:g}"
    if args.colocate:
        yield f"{where}: with --colocate, where engines come and go with the trainer (wanted: without)"
    if args.rollout_external:
        yield f"{where}: the engines are somebody else's (wanted: engines of the run)"
    if (most_asked := args.sglang_server_concurrency) <= CROWDED * args.rollout_queue_per_engine:
        never = f"each has at most --sglang-server-concurrency {most_asked}, so that none would ever join"
        yield f"{where}: {never} (wanted: less than {most_asked / CROWDED:g}, or more of that)"
    for model in args.served_models[:1]:
        if model.has_pd_disaggregation:
            yield f"{where}: model {model.name} has prefill and decode engines (wanted: regular ones)"
            continue
        size = next((g.size for g in model.server_groups if g.worker_type != PLACEHOLDER), 1)
        places = args.rollout_num_engines + (args.rollout_spare_gpus or 0) // size
        most = places if args.rollout_max_engines is None else args.rollout_max_engines
        if most > places:
            wanted = f"wanted: at most {places}, or more --rollout-spare-gpus"
            yield f"--rollout-max-engines {most}: more than the places of engines ({wanted})"
        if (args.rollout_min_engines or 1) > most:
            yield f"--rollout-min-engines {args.rollout_min_engines}: more than the {most} engines at most"


def _of_size(where: str, each: str, size: int) -> str:
    """The name of an engine's size; a flag stands for itself."""
    return f"{each} {size}" if each.startswith("--") else f"{where}: {each} {size}"


def bad_overrides(
    args: Namespace, options: Mapping[str, argparse.Action], owned: frozenset[str]
) -> Iterator[str]:
    """Overrides that the server does not know, that the run decides, or of another type.

    Args:
        options: of the server's own parser, by dest.
        owned: those that the launcher sets for each engine.
    """
    server = "the embedded engine" if args.rollout_engine == "embedded" else "SGLang"
    for model in args.served_models:
        for number, group in enumerate(model.server_groups, 1):
            where = f"{_origin(args)}: model {model.name}: group {number}: overrides"
            for key, value in group.overrides.items():
                if key == "model_path" or value is None:
                    continue
                if key in _KEYS:
                    flag = f"--sglang-{key.replace('_', '-')}"
                    yield f"{where}: {key}: all engines have one (wanted: {flag})"
                    continue
                if key in owned:
                    yield f"{where}: {key}: decided by the run for each engine (wanted: without)"
                elif key not in options:
                    yield f"{where}: {key}: not an option of {server}"
                elif reason := _why_no_value(options[key], value) or _out_of_range(key, value):
                    yield f"{where}: {key} is {value!r:.80} (wanted: {reason})"
                elif key == "tokenizer_path" and not Path(value).is_dir():
                    yield f"{where}: {key} {value!r:.80}: no directory (wanted: one with a tokenizer)"


def _why_no_value(action: argparse.Action, value: Any) -> str | None:
    """What is wanted instead of a value; None if the option can have it."""
    if value is None:
        return None
    if action.nargs == 0:
        return None if isinstance(value, bool) else "true or false"
    items = value if isinstance(value, list) else [value]
    if isinstance(value, list) and action.nargs is None:
        return "one value"
    if action.choices is not None and not set(items) <= set(action.choices):
        return " or ".join(map(str, action.choices))
    kinds: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}
    wanted = kinds.get(action.type)
    if wanted and not all(isinstance(item, wanted) and not isinstance(item, bool) for item in items):
        return getattr(action.type, "__name__", "another type")
    return None


def _out_of_range(key: str, value: Any) -> str | None:
    """What is wanted of an option that both servers have; SGLang declares no ranges."""
    spec = next((spec for spec in flags_of(EmbeddedServerArgs) if spec.dest == key), None)
    reason = None if spec is None or not has_range(spec) else why_bad(spec, value)
    return reason and reason.removeprefix("wanted ")


def missing_models(args: Namespace) -> Iterator[str]:
    """Directories of further models that are not there."""
    for model in _others(args):
        directory = Path(model.model_path or "")
        where = f"{_origin(args)}: model {model.name}: model_path {directory}"
        if not (directory / "config.json").is_file():
            yield f"{where}: no config.json there (wanted: a local Hugging Face directory)"
        elif not (args.check or any(directory.glob("*.safetensors"))):
            yield f"{where}: holds no .safetensors file"


def unusable_models(args: Namespace) -> Iterator[str]:
    """Further models that the engine cannot serve, or whose weights the trainer's cannot replace."""
    for model in _others(args):
        where = f"{_origin(args)}: model {model.name}: model_path {model.model_path}"
        try:
            own = _sizes(model.model_path or "")
            if args.rollout_engine == "embedded":
                read_shape(model.model_path or "")
                yield from _unusable_weights(where, model.model_path or "")
        except HfConfigError as error:
            yield f"{where}: {error}"
            continue
        trained = _sizes(args.hf_checkpoint)
        for name in _SHAPE if model.update_weights else ():
            if own[name] != trained[name]:
                yield (
                    f"{where}: takes the trainer's weights, but its {name} is {own[name]} "
                    f"(wanted: {trained[name]} as --hf-checkpoint, or update_weights: false)"
                )


def _unusable_weights(where: str, path: str) -> Iterator[str]:
    """SGLang reads formats that nothing here knows of."""
    if not any(Path(path).glob("*.safetensors")):  # --check does without
        return
    try:
        weight_names(path)
        if reason := bad_values(path, path):
            yield f"{where}: {reason}"
    except (ValueError, OSError) as error:
        yield f"{where}: {error}"


def _sizes(path: str) -> dict[str, Any]:
    """What config.json says of `_SHAPE`."""
    config = HfConfig.read(path)
    return {**{name: config.text.get(name) for name in _SHAPE}, "model_type": config.get("model_type")}


def _others(args: Namespace) -> Iterator[ModelConfig]:
    return (model for model in args.served_models if model.model_path != args.hf_checkpoint)


def _origin(args: Namespace) -> str:
    return "--prefill-num-servers" if args.prefill_num_servers is not None else "--sglang-config"
