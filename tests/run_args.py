"""``args`` and the configuration of a run, as the real parser makes them.

args = run_args(advantage_estimator="gspo", eps_clip=0.1)     # every flag, and what follows from these
config = run_config(args)                                     # the same as a tree
config = config_with(colocate=True, sglang_pp_size=2)         # with names of foreign parsers, too
args = plugin_args(rollout_num_gpus=8)                        # these names and no others
"""

import functools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from slime.arguments.core.parser import parse
from slime.arguments.groups import advantages, distillation, kl, loss, off_policy
from slime.arguments.registry import CONFIG_GROUPS, derived_names
from slime.config.model import ModelConfig
from slime.config.run import RunConfig, run_config
from tests.families import save_tiny_config


def names_of(kind: Any) -> Iterator[str]:
    """Yields the names of the values in a slice and its groups."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield from names_of(hints[field.name]) if is_dataclass(hints[field.name]) else (field.name,)


_MODULES = (loss, kl, advantages, off_policy, distillation)
_GROUPS = tuple(module.CONFIG_GROUP for module in _MODULES)
"""The config groups of the algorithm: what follows from their flags is derived for each call."""
_FLAGS = frozenset(spec.dest for group in _GROUPS for spec in group.specs())
_NAMES = frozenset(names_of(RunConfig)) - {"flat", "others"}
_FOREIGN = ("sglang_", "router_")
"""What names begin with that parsers of SGLang's add, where it is installed."""


@functools.cache
def _parsed() -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags of a short command line, and these with all that follows from them."""
    with tempfile.TemporaryDirectory() as directory:
        model = str(save_tiny_config("qwen3", Path(directory)))
        line = ["--hf-checkpoint", model, "--rollout-batch-size", "2", "--rollout-num-gpus", "1"]
        given = parse([*line, "--actor-num-gpus-per-node", "1"], None)
        complete = copy(given)
        for group in CONFIG_GROUPS:
            group.derive(complete)
    return vars(given), vars(complete)


def run_args(**overrides: Any) -> Namespace:
    """Every flag as given here, else with its default, and what follows from those of the algorithm.

    Values of other groups are taken as they are, and so are values that follow from flags.

    Raises:
        TypeError: a name that ``args`` does not have.
    """
    given, complete = _parsed()
    if unknown := overrides.keys() - complete.keys() - derived_names():
        raise TypeError(f"no names of args: {', '.join(sorted(unknown))}")
    return _completed({**complete, **{name: given[name] for name in _FLAGS}}, overrides)


def plugin_args(**values: Any) -> Namespace:
    """What a plug-in has that makes its own ``args``, for functions that promise to read no other names.

    Raises:
        TypeError: a name that ``args`` never have.
    """
    known = _parsed()[1].keys() | derived_names() if values else ()
    if unknown := [name for name in values if name not in known and not name.startswith(_FOREIGN)]:
        raise TypeError(f"no names of args: {', '.join(sorted(unknown))}")
    return Namespace(**values)


def with_groups(values: Mapping[str, Any]) -> Namespace:
    """``args`` of a test that lists them itself, with what else `run_config` reads as `run_args` makes it."""
    given, complete = _parsed()
    if "params_dtype" in values:  # which follows from these
        formats = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        values = {**values, **{f: str(values["params_dtype"]) == f"torch.{d}" for d, f in formats.items()}}
    full = _completed({**complete, **{name: given[name] for name in _FLAGS}}, values)
    return Namespace(**{**values, **{name: getattr(full, name) for name in _NAMES}})


def shape_with(**values: Any) -> ModelConfig:
    """The shape of a model, what is not given as a tiny model's."""
    return config_with(**values).model


def config_with(**values: Any) -> RunConfig:
    """The tree of `with_groups`."""
    return run_config(with_groups(values))


def _completed(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> Namespace:
    args = Namespace(**{**defaults, **values})
    for group in _GROUPS:
        group.derive(args)
    vars(args).update({name: value for name, value in values.items() if name not in _FLAGS})
    return args
