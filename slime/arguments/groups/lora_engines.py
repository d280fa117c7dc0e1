"""Options of SGLang by which an engine would not have all adapters of a run, or have another one's."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.config.lora import ADAPTERS_AT_ONCE, LoraConfig
from slime.config.run import filled

_LOADED, _AT_ONCE, _PATHS = "max_loaded_loras", "max_loras_per_batch", "lora_paths"


def not_kept(args: Namespace, name: str) -> Iterator[str]:
    """What SGLang does with adapters that it is given while it runs, where that is not to keep them.

    Args:
        name: of the flag that has it given them.
    """
    if (workers := _option(args, "tokenizer_worker_num") or 1) > 1:
        yield (
            f"--sglang-tokenizer-worker-num {workers}: not with {name}, one of these processes alone learns "
            "of an adapter (wanted: 1)"
        )
    config, paths = filled(LoraConfig, args), _option(args, _PATHS) or []
    at_once = _option(args, _AT_ONCE) or ADAPTERS_AT_ONCE
    if at_once == ADAPTERS_AT_ONCE:
        at_once = config.adapters_at_once
    least = max(at_once, len(config.served_adapters) + len(paths))
    if (kept := _option(args, _LOADED)) is not None and kept < least:
        yield (
            f"--sglang-max-loaded-loras {kept}: not with {name}, an engine would forget the adapter that was "
            f"asked for least (wanted: at least {least}, or leave it out)"
        )
    for taken in config.served_adapters:
        if taken in map(_name_of, paths):
            yield (
                f"--sglang-lora-paths: an adapter is called {taken}, as one that {name} sends to engines "
                "(wanted: another name)"
            )


def _option(args: Namespace, name: str) -> Any:
    """The value of an option of SGLang; None where none is given, or SGLang is not installed."""
    return getattr(args, f"sglang_{name}", None)


def _name_of(path: Any) -> str:
    """The name of an adapter by one of SGLang's three ways to give it."""
    return str(path.get("lora_name")) if isinstance(path, dict) else str(path).partition("=")[0]
