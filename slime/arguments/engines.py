"""The engines: which server generates, and the options of its own parser (``--sglang-*``)."""

import argparse
import copy
import importlib.util
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slime.arguments.concern import Concern
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

# What the options of older versions of SGLang's server are called today.
RENAMED = {
    "--sglang-cuda-graph-bs": "--sglang-cuda-graph-bs-decode",
    "--sglang-cuda-graph-max-bs": "--sglang-cuda-graph-max-bs-decode",
    "--sglang-disable-piecewise-cuda-graph": "--sglang-disable-prefill-cuda-graph",
    "--sglang-mamba-scheduler-strategy": "--sglang-mamba-radix-cache-strategy",
}


@dataclass(frozen=True)
class EngineArgs:
    """The engines as a whole."""

    rollout_engine: Literal["auto", "sglang", "embedded"] = flag(
        "auto", help="engine server; auto is sglang where it is installed and a GPU is present, else embedded"
    )
    sglang_config: str | None = refused(help="YAML file of models and server groups")
    rollout_external_engine_addrs: list[str] | None = refused(help="host:port of engines started elsewhere")
    prefill_num_servers: int | None = refused(help="engines that only prefill", same_as_default=(0,))


@dataclass(frozen=True)
class DerivedEngines:
    """What an engine is.

    Attributes:
        rollout_external: whether the engines were started elsewhere.
        sglang_tp_size: GPUs of one engine.
    """

    rollout_engine: Literal["sglang", "embedded"]
    rollout_external: bool
    sglang_tp_size: int


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


def derive(args: Namespace) -> None:
    """Names that hooks know the engines by."""
    args.rollout_external = False
    args.sglang_tp_size = args.rollout_num_gpus_per_engine


def contradictions(args: Namespace) -> Iterator[str]:
    """What the chosen server cannot do."""
    if getattr(args, "sglang_admin_api_key", None):
        yield "--sglang-admin-api-key: not supported (wanted: --sglang-api-key, one key for all endpoints)"
    if args.debug_train_only or args.rollout_engine != "embedded":
        return
    from slime.utils.accelerator import has_gpu  # imports torch, which a misspelt flag need not wait for

    each = args.rollout_num_gpus_per_engine
    if each > 1:
        yield f"--rollout-num-gpus-per-engine {each}: the embedded engine takes one GPU (wanted: 1)"
    if has_gpu() and not args.debug_rollout_only:
        yield (
            "--rollout-engine embedded (also auto where SGLang is missing): a trainer on GPUs sends weights "
            "in ways that it does not speak (wanted: pip install -e '.[sglang]')"
        )


def embedded_server_flags() -> list[Flag]:
    """``--sglang-*`` for the options that the embedded engine honours."""
    return [
        spec for spec in flags_of(EmbeddedServerArgs, "sglang") if _field(spec.dest) not in LAUNCHER_OWNED
    ]


def _field(dest: str) -> str:
    return dest.removeprefix("sglang_")


def with_current_names(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a command line with SGLang's names of today, and a note for each that was another one.

    Args:
        options: the option strings that the installed server has.
    """
    current, notes = [], []
    for word in words:
        name, equals, value = word.partition("=")
        new = RENAMED.get(name, name)
        if new != name and name not in options and new in options:
            notes.append(f"{name}: is called {new} by this version of SGLang, and taken as that")
            word = f"{new}{equals}{value}"
        current.append(word)
    return current, notes


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


CONCERN = Concern(
    {"engines": EngineArgs}, derived=DerivedEngines, derive=derive, contradictions=contradictions
)
