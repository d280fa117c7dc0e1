"""The engines: which server generates, and the options of its own parser (``--sglang-*``)."""

import argparse
import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from slime.arguments.core.absent_sglang import bad_numbers
from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, add_flags, flags_of, given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.debug import trains_only
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.arguments.validate.external_engines import bad_external
from slime.arguments.validate.fleet_checks import (
    bad_models,
    bad_overrides,
    bad_scaling,
    bad_spares,
    missing_models,
    unusable_models,
)
from slime.arguments.validate.quantized_engines import bad_formats, packed_beyond_experts
from slime.arguments.validate.served_models import ModelConfig, SglangConfig
from slime.arguments.validate.sglang_models import unlike_sglang
from slime.arguments.validate.shard_engines import bad_shards
from slime.config.engines import EngineConfig

# Set by the launcher for each engine, so they are not flags of a run.
LAUNCHER_OWNED = frozenset(
    {
        "model_path",
        "config",
        "trust_remote_code",
        "random_seed",
        "enable_memory_saver",
        "tp_size",
        "host",
        "port",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "gpu_id_step",
        "base_gpu_id",
        "nccl_port",
        "skip_server_warmup",
        "enable_return_routed_experts",
    }
)


def has_sglang() -> bool:
    """Whether SGLang is installed."""
    return importlib.util.find_spec("sglang") is not None


def choose_engine(requested: str, elsewhere: bool = False) -> str:
    """``sglang`` or ``embedded`` for the value of ``--rollout-engine``.

    Args:
        elsewhere: the run is one for other machines, which have GPUs and SGLang.

    Raises:
        UsageError: SGLang was asked for and is not installed.
    """
    if elsewhere and requested != "embedded":
        return "sglang"
    installed = has_sglang()
    if requested == "sglang" and not installed:
        raise UsageError(
            "--rollout-engine sglang: sglang is not installed (wanted: pip install -e '.[sglang]')"
        )
    if requested != "auto":
        return requested
    if not installed:
        return "embedded"
    from slime.utils.hardware import has_gpu

    return "sglang" if has_gpu() else "embedded"


def notes(args: Namespace) -> Iterator[str]:
    """Engines of a run that has none, and bounds of engines whose number does not change by itself."""
    if not trains_only(args):
        if args.rollout_queue_per_engine is None:
            for name, _ in given(args, "rollout_min_engines", "rollout_max_engines"):
                yield f"{name}: has no effect without --rollout-queue-per-engine"
        return
    of_engines = "sglang_config", "rollout_external_engine_addrs", "prefill_num_servers", "rollout_spare_gpus"
    for name, _ in given(args, *of_engines, "rollout_queue_per_engine"):
        yield f"{name}: has no effect, the run has no engines"


def derive(args: Namespace) -> None:
    """The models and their engines, under the names that hooks know."""
    args.rollout_external = not trains_only(args) and bool(
        args.rollout_external or args.rollout_external_engine_addrs
    )
    args.router_external = args.sglang_router_ip is not None
    args.served_models = _served_models(args)
    addresses = (args.rollout_external_engine_addrs or ()) if args.rollout_external else ()
    first = args.served_models[0].num_engines if args.served_models else 0
    args.rollout_num_engines = len(addresses) or first
    updated = [model.model_path for model in args.served_models if model.update_weights]
    args.synced_checkpoint = updated[0] if updated else args.hf_checkpoint
    args.sglang_tp_size = args.rollout_num_gpus_per_engine // (getattr(args, "sglang_pp_size", None) or 1)


def _served_models(args: Namespace) -> list[ModelConfig]:
    if trains_only(args) or args.rollout_external or args.rollout_num_gpus == 0:
        return []
    if args.sglang_config is not None:
        config = SglangConfig.from_yaml(args.sglang_config)
    elif args.prefill_num_servers is not None:
        config = SglangConfig.from_prefill_num_servers(args)
    else:
        config = SglangConfig.of_flags(args)
    return [model.resolve(args) for model in config.models]


def contradictions(args: Namespace) -> Iterator[str]:
    """What the chosen server cannot do."""
    if getattr(args, "sglang_admin_api_key", None):
        yield "--sglang-admin-api-key: not supported (wanted: --sglang-api-key, one key for all endpoints)"
    sources = dict(given(args, "sglang_config", "prefill_num_servers", "rollout_external_engine_addrs"))
    if len(sources) > 1 and not args.debug_train_only:
        yield f"{' and '.join([*sources][:2])}: only one of them at a time"
    yield from unlike_sglang(args)
    yield from bad_shards(args)
    yield from bad_spares(args)
    yield from bad_scaling(args)
    if args.rollout_external:
        yield from bad_external(args)
    if not args.served_models:
        yield from bad_formats(args)
        return
    yield from bad_models(args)
    if args.rollout_engine == "embedded" or has_sglang():
        yield from bad_overrides(args, server_options(args.rollout_engine), LAUNCHER_OWNED)
    else:
        yield from bad_numbers(args)
    yield from (_bad_devices if args.rollout_engine == "embedded" else _float32_on_gpus)(args)
    yield from bad_formats(args)


def unusable(args: Namespace) -> Iterator[str]:
    """Checkpoints that the engines cannot serve, or whose weights the trainer's cannot replace."""
    yield from unusable_models(args)
    yield from packed_beyond_experts(args)


def _bad_devices(args: Namespace) -> Iterator[str]:
    """Embedded engines on a GPU that is not there, or on the CPU beside a trainer that sends GPU memory."""
    chosen = [found for found in _chosen(args, "device") if found[2] is not None]
    if not chosen:
        return
    from slime.utils.hardware import has_gpu

    for where, model, device in chosen:
        if device == "cuda" and not has_gpu() and not args.check:
            yield f"{where} cuda: this machine has no GPU (wanted: cpu, or leave it out)"
        if device == "cpu" and has_gpu() and model.update_weights and not args.debug_rollout_only:
            yield f"{where} cpu: a trainer on GPUs sends weights to GPUs (wanted: cuda, or leave it out)"


def _float32_on_gpus(args: Namespace) -> Iterator[str]:
    """SGLang's kernels for the norms of its models exist in 16 bits only."""
    wrong = []
    for where, _, dtype in _chosen(args, "dtype"):
        if dtype in (None, "auto") and args.fp32:
            wrong.append("--fp32")
        elif dtype in ("float32", "float"):
            wrong.append(f"{where} {dtype}")
    if not wrong:
        return
    from slime.utils.hardware import has_gpu

    if has_gpu():
        yield (
            f"{wrong[0]}: SGLang does not compute in float32 on GPUs: its kernel of RMSNorm has 16 bits "
            "(wanted: --bf16, another --sglang-dtype, or --rollout-engine embedded)"
        )


def _chosen(args: Namespace, option: str) -> Iterator[tuple[str, ModelConfig, Any]]:
    """What each group of engines is told of a server's option: by which flag, of which model, the value."""
    for model in args.served_models:
        for number, group in enumerate(model.server_groups, 1):
            where, value = f"--sglang-{option}", getattr(args, f"sglang_{option}", None)
            if option in group.overrides:
                where = f"--sglang-config {args.sglang_config}: model {model.name}: group {number}: {option}"
                value = group.overrides[option]
            yield where, model, value


def sglang_server_args() -> Any:
    """The class of the installed SGLang that declares the options of its server."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs


@cache
def server_options(engine: str) -> Mapping[str, argparse.Action]:
    """The options of an engine server's own parser, by dest."""
    parser = argparse.ArgumentParser(add_help=False)
    if engine == "embedded":
        add_flags(parser, flags_of(EmbeddedServerArgs))
    else:
        sglang_server_args().add_cli_args(parser)
    return MappingProxyType({action.dest: action for action in parser._actions})


def embedded_server_flags() -> list[Flag]:
    """``--sglang-*`` for the options that the embedded engine honours."""
    return [
        spec for spec in flags_of(EmbeddedServerArgs, "sglang") if _field(spec.dest) not in LAUNCHER_OWNED
    ]


def _field(dest: str) -> str:
    return dest.removeprefix("sglang_")


CONFIG_GROUP = ConfigGroup(
    {"engines": EngineConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing_models,
    unusable=unusable,
)
