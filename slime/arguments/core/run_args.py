"""The flat Namespace of a run's flags, of which one value needs torch."""

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from slime.arguments.core.errors import NotKnownError

if TYPE_CHECKING:
    import torch

_FORGOTTEN = "_forgotten"
V = TypeVar("V")


class RunArgs(Namespace):
    """A Namespace that makes ``params_dtype`` of other flags when it is first asked for it.

    Importing torch takes a second, and the driver reads no number format.
    """

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get(_FORGOTTEN, ()):
            raise NotKnownError(name)
        if name != "params_dtype" or not {"fp16", "fp32"} <= vars(self).keys():
            raise AttributeError(f"args have no {name!r}")
        self.params_dtype = _params_dtype(self)
        return self.params_dtype


def forget(args: Namespace, names: Iterable[str]) -> None:
    """Takes values off ``args`` that cannot be used; who reads one of them gets a ``NotKnownError``."""
    for name in names:
        vars(args).pop(name, None)
        vars(args).setdefault(_FORGOTTEN, set()).add(name)


def is_known(args: Namespace, name: str) -> bool:
    """Whether nothing was wrong with a value so far."""
    return name in vars(args) or name not in vars(args).get(_FORGOTTEN, ())


def add_params_dtype(args: Namespace) -> None:
    """Puts ``params_dtype`` among ``vars(args)`` in a process that has imported torch anyway."""
    if "torch" in sys.modules:
        args.params_dtype = _params_dtype(args)


def copied(args: V, **changes: Any) -> V:
    """A copy of ``args`` in which these are others."""
    kind = RunArgs if isinstance(args, RunArgs) else Namespace
    copy = kind(**{**vars(args), **changes})
    if kind is RunArgs and "params_dtype" not in vars(copy):
        add_params_dtype(copy)
    return cast(V, copy)


def _params_dtype(args: Namespace) -> "torch.dtype":
    import torch

    return torch.float16 if args.fp16 else torch.float32 if args.fp32 else torch.bfloat16
