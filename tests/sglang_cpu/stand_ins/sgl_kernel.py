"""In place of SGLang's kernels, which come for GPUs only: every name is there, and none can be called."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []  # it has submodules


class Absent:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name}: SGLang's kernels are not installed (a CPU has none)")

    def __getattr__(self, name: str) -> "Absent":
        return _absent(self._name, name)


def _absent(owner: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{owner}.{name}")


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _absent(module.__name__, name)  # type: ignore[method-assign]


def __getattr__(name: str) -> Absent:
    return _absent("sgl_kernel", name)


sys.meta_path.insert(0, _Submodules())
