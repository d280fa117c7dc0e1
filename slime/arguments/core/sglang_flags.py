"""``--sglang-*``: the options of the installed SGLang's server on the command line of a run."""

import argparse
import copy
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.arguments.groups.engines import LAUNCHER_OWNED, sglang_server_args


def add_sglang_server_flags(group: argparse._ArgumentGroup) -> None:
    """``--sglang-*`` for every option of the installed SGLang's server.

    The negative form of ``--sglang-x`` is ``--sglang-no-x`` or ``--no-sglang-x``.
    """
    original = argparse.ArgumentParser(add_help=False)
    sglang_server_args().add_cli_args(original)
    for action in original._actions:
        if action.dest not in LAUNCHER_OWNED:
            group._add_action(_renamed(action))


def _renamed(action: argparse.Action) -> argparse.Action:
    if isinstance(action, argparse.BooleanOptionalAction):
        return _Pair(action)
    renamed = copy.copy(action)
    renamed.option_strings = [_with_prefix(name) for name in _long_names(action)]
    renamed.dest = f"sglang_{action.dest}"
    renamed.required = False
    return renamed


def _long_names(action: argparse.Action) -> list[str]:
    return [name for name in action.option_strings if name.startswith("--")]


def _with_prefix(name: str) -> str:
    return f"--sglang-{name.removeprefix('--')}"


class _Pair(argparse.Action):
    """A switch and its negative form; argparse's own tells them apart by ``--no-`` at the beginning."""

    def __init__(self, action: argparse.BooleanOptionalAction) -> None:
        names = _long_names(action)
        negative = [name for name in names if name.startswith("--no-")]
        positive = [name for name in names if name not in negative]
        self._off = {f"--no-sglang-{name.removeprefix('--no-')}" for name in negative}
        self._off |= {_with_prefix(name) for name in negative}
        super().__init__(
            [*map(_with_prefix, positive), *sorted(self._off)],
            f"sglang_{action.dest}",
            nargs=0,
            default=action.default,
            help=action.help,
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._off)
