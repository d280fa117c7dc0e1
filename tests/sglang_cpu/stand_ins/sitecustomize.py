"""Lets torchvision load beside a torch that it was not built for.

Python imports this file at its start wherever the folder is on ``PYTHONPATH``. The operators themselves are
for images: none of them is called here.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _BeforeTorchvision(MetaPathFinder):
    """Declares, at the first import of torchvision, the operators that it describes without having them."""

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


_keep: list[_BeforeTorchvision] = []  # a library that is collected takes its operators with it
sys.meta_path.insert(0, _BeforeTorchvision())
