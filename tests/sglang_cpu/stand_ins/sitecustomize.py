"""What has to be otherwise on a CPU in modules that SGLang imports.

Python imports this file at its start wherever the folder is on ``PYTHONPATH``.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Declares, at the first import of torchvision, the operators that it describes without having them.

    It loads beside a torch that it was not built for then. The operators are for images: none is called here.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self._library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
            _keep.append(self)


class _BeforeRoutedExperts(MetaPathFinder):
    """Lets SGLang record the experts of tokens in plain memory: to pin it takes CUDA's library."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "sglang.srt.state_capturer.base":
            sys.meta_path.remove(self)
            import torch
            from sglang.srt.mem_cache.pool_host import common

            common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **options: torch.empty(dims, dtype=dtype)


class _BeforeAdapters(MetaPathFinder):
    """Lets SGLang's layers with adapters have plain memory, likewise."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "sglang.srt.lora.layers":
            sys.meta_path.remove(self)
            import torch

            for name in ("arange", "empty", "tensor", "zeros"):
                setattr(torch, name, _without_pinning(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)


_keep: list[_BeforeTorchvision] = []  # a library that is collected takes its operators with it
sys.meta_path[:0] = [_BeforeTorchvision(), _BeforeRoutedExperts(), _BeforeAdapters()]
