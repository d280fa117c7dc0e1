"""Flags of the engines (``--sglang-*``) and of the router (``--router-*``)."""

import argparse
import copy
import importlib.util
from dataclasses import dataclass

from slime.arguments.embedded_engine import EmbeddedServerArgs
from slime.arguments.errors import UsageError
from slime.arguments.flags import Flag, flag, flags_of, refused

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
ROUTER_DEFAULTS = {
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
}


@dataclass(frozen=True)
class EngineFleetArgs:
    """The engines as a whole."""

    sglang_server_concurrency: int = flag(512, help="requests in flight per engine at most")
    sglang_router_request_timeout_secs: int = flag(14400, help="seconds the router waits for one request")
    sglang_router_ip: str | None = refused(help="address of a router started elsewhere")
    sglang_router_port: int | None = flag(help="port of the router; default a free one")
    sglang_config: str | None = refused(help="YAML file of models and server groups")


def choose_engine(requested: str) -> str:
    """``sglang`` or ``embedded`` for the value of ``--rollout-engine``.

    Raises:
        UsageError: SGLang was asked for and is not installed.
    """
    installed = importlib.util.find_spec("sglang") is not None
    if requested == "sglang" and not installed:
        raise UsageError(
            "--rollout-engine sglang: sglang is not installed (wanted: pip install -e '.[sglang]')"
        )
    if requested != "auto":
        return requested
    if not installed:
        return "embedded"
    from slime.utils.accelerator import has_gpu  # imports torch, which error messages need not wait for

    return "sglang" if has_gpu() else "embedded"


def embedded_server_flags() -> list[Flag]:
    """``--sglang-*`` for the options that the embedded engine honours."""
    return [
        spec for spec in flags_of(EmbeddedServerArgs, "sglang") if _field(spec.dest) not in LAUNCHER_OWNED
    ]


def _field(dest: str) -> str:
    return dest.removeprefix("sglang_")


def add_sglang_server_flags(group: argparse._ArgumentGroup) -> None:
    """``--sglang-*`` for every option of the installed SGLang's server."""
    from sglang.srt.server_args import ServerArgs

    original = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(original)
    for action in original._actions:
        if action.dest in LAUNCHER_OWNED:
            continue
        renamed = copy.copy(action)
        renamed.option_strings = [
            f"--sglang-{name.removeprefix('--')}" for name in action.option_strings if name.startswith("--")
        ]
        renamed.dest = f"sglang_{action.dest}"
        renamed.required = False
        group._add_action(renamed)


def _router_group(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
    if action.help:
        # RouterArgs writes defaults into its help, which would contradict ours.
        action.help = action.help.split(" (default")[0]
    if action.dest in ROUTER_DEFAULTS:
        action.default = ROUTER_DEFAULTS[action.dest]
        parser.set_defaults(**{action.dest: action.default})


def add_router_flags(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """``--router-*`` for every option of sglang_router, with our defaults."""
    from sglang_router.router_args import RouterArgs

    original = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(original, use_router_prefix=True, exclude_host_port=True)
    for action in original._actions:
        if not action.option_strings[0].startswith("--router-"):
            continue
        adopted = copy.copy(action)
        group._add_action(adopted)
        _router_group(parser, adopted)
