"""Changes megatron-core as it is imported, and nothing before that.

Plug-ins import this package in processes that never train. So the changes wait until the first module of
megatron-core is asked for; each module is then treated right after it was executed.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PREFIX = "megatron.core"
# Its own logs would go there; it takes half a second of every rank's start.
_HIDDEN = {
    "megatron.core.inference.contexts.dynamic_context": "wandb",
    "megatron.core.inference.engines.dynamic_engine": "wandb",
    "megatron.core.timers": "wandb",
}
_NAMES = {
    # The router asks whether it is None, but it is not defined at all.
    "megatron.core.transformer.moe.moe_utils": ("te_general_gemm",),
}
# This module believes that it is installed, and looks for instances of one of its classes.
_BELIEVER, _CLASS = "megatron.core.transformer.multi_latent_attention", "TELinear"
# Recomputing norms asks TransformerEngine about float8, unless its class is told None of it.
_ASKER = "megatron.core.tensor_parallel.random"


def register() -> None:
    """Sees to it that megatron-core is treated whenever it is imported; what is there is treated at once."""
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    finder = _MegatronFinder()
    sys.meta_path.insert(0, finder)
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(_PREFIX)]
    if loaded:
        finder.prepare()
    for module in loaded:
        _treat(module)


def _treat(module: types.ModuleType) -> None:
    from slime.backends.megatron_utils import cpu_support, fused_adam
    from slime.utils import safe_checkpoint

    cpu_support.treat(module)
    if module.__name__ == "megatron.core.optimizer":
        fused_adam.install()
    if module.__name__ == "megatron.core.dist_checkpointing.strategies.torch":
        safe_checkpoint.install()
    _treat_without_te(module)


@contextmanager
def _hiding(name: str | None) -> Iterator[None]:
    """Whoever imports this module meanwhile is told that it is not installed, unless it is loaded already."""
    if name is None or name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


class _TreatedLoader(importlib.abc.Loader):
    """The real loader, followed by `_treat`."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _hiding(_HIDDEN.get(module.__name__)):
            self._loader.exec_module(module)
        _treat(module)

    def __getattr__(self, name: str) -> Any:
        # inspect and linecache ask a loader for get_source and the like.
        return getattr(self._loader, name)


class _MegatronFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._prepared = False

    def prepare(self) -> None:
        """Runs once, before the first module is executed."""
        from slime.backends.megatron_utils import cpu_support

        if not self._prepared:
            self._prepared = True
            # The trainer does without them by design.
            warnings.filterwarnings(
                "ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed"
            )
            cpu_support.prepare()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        self.prepare()
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TreatedLoader(spec.loader)
        return spec


def _treat_without_te(module: types.ModuleType) -> None:
    """Mends what megatron-core 0.16.1 forgets where there is no TransformerEngine."""
    for name in _NAMES.get(module.__name__, ()):
        vars(module).setdefault(name, None)
    if module.__name__ == _BELIEVER and not isinstance(vars(module)[_CLASS], type):
        vars(module)["HAVE_TE"] = False
    if module.__name__ == _ASKER and not vars(module)["HAVE_TE"]:
        vars(module)["CheckpointWithoutOutput"].__init__.__defaults__ = (None,)
