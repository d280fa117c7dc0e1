"""A GPU for machines that have none: tensors say that they are on it, and whatever a GPU refuses fails here
too.

    with PretendGpu():
        x = torch.zeros(2, device="cuda:0")
        x + x                                # computed by the CPU; a tensor whose device is cuda:0
        x + torch.zeros(2)                   # RuntimeError: one is on the host
        x.numpy()                            # TypeError

It sees calls of torch from Python, in the thread that entered it. What a GPU takes and this does too:
indices and numbers (tensors without dimensions) from the host, and copies in both directions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
_MARK = "_on_pretend_gpu"
_GETTERS: dict[Any, Callable[[bool], object]] = {
    torch.Tensor.device.__get__: lambda on_gpu: GPU,
    torch.Tensor.is_cuda.__get__: lambda on_gpu: True,
    torch.Tensor.is_cpu.__get__: lambda on_gpu: False,
}
_SET_DATA = torch.Tensor.data.__set__
_MIXING = (torch.Tensor.copy_, torch.Tensor.to, torch._has_compatible_shallow_copy_type, _SET_DATA)
_TO_HOST = (torch.Tensor.numpy, torch.Tensor.__array__)


def on_gpu(tensor: torch.Tensor) -> bool:
    return bool(vars(tensor).get(_MARK, False))


def _mark(tensor: torch.Tensor, gpu: bool) -> None:
    setattr(tensor, _MARK, gpu)


def _is_advanced(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor | list) for part in parts)


class PretendGpu(TorchFunctionMode):
    """There is a GPU, number 0, within this context."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _GETTERS and on_gpu(args[0]):
            return _GETTERS[func](True)
        if func is torch._C._nn._parse_to:  # reads the arguments of Module.to, and makes nothing
            return func(*args, **kwargs)
        args, wanted = self._take_device(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._check(func, args, kwargs, tensors)
        if func is torch.histc:  # which counts integers on a GPU, and floats alone on the CPU
            args = (args[0].double(), *args[1:])
        result = func(*args, **kwargs)
        if func == _SET_DATA:
            _mark(args[0], on_gpu(args[1]))
            return result
        if func is torch.Tensor.__getitem__:
            tensors = tensors[:1]
        gpu = any(map(on_gpu, tensors)) if wanted is None else wanted.type == "cuda"
        return self._marked(result, gpu, tensors, moves=wanted is not None)

    def _take_device(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], torch.device | None]:
        """The arguments for the CPU, and the device that they named."""
        wanted: torch.device | None = HOST if func is torch.Tensor.cpu else None
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"])
            kwargs["device"] = HOST if wanted.type == "cuda" else wanted
        taken = []
        for place, value in enumerate(args):
            if isinstance(value, torch.device) or (func is torch.Tensor.to and isinstance(value, str)):
                wanted = torch.device(value)
                value = HOST if wanted.type == "cuda" else wanted
            elif func is torch.Tensor.to and place and isinstance(value, torch.Tensor):
                wanted = GPU if on_gpu(value) else value.device
            taken.append(value)
        return tuple(taken), wanted

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        if func in _TO_HOST and on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        if generators and any(map(on_gpu, tensors)):
            raise RuntimeError(f"{func}: expected a 'cuda' device type for generator but found 'cpu'")
        if any(func is mixing or func == mixing for mixing in _MIXING):
            return
        if func is torch.Tensor.__getitem__:
            # what is on the host takes no indices from a GPU, the other way it is fine
            tensors = tensors if not on_gpu(args[0]) else []
        elif func is torch.Tensor.__setitem__:
            target, index, value = args
            indices = [leaf for leaf in tree_leaves(index) if isinstance(leaf, torch.Tensor)]
            self._require_together(func, [target, *indices] if not on_gpu(target) else [])
            values = [value] if isinstance(value, torch.Tensor) else []
            tensors = [target, *values] if _is_advanced(index) else []
        self._require_together(func, tensors)

    def _require_together(self, func: Any, tensors: Iterable[torch.Tensor]) -> None:
        on_host = [t for t in tensors if not on_gpu(t) and t.dim() > 0 and t.device == HOST]
        if on_host and any(map(on_gpu, tensors)):
            name = getattr(func, "__name__", func)
            shapes = [list(tensor.shape) for tensor in on_host]
            raise RuntimeError(f"{name}: tensors on cuda:0, and on the host those of shapes {shapes}")

    def _marked(self, result: Any, gpu: bool, tensors: list[torch.Tensor], moves: bool) -> Any:
        given = {id(tensor) for tensor in tensors}

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in given:
                if not moves or on_gpu(tensor) == gpu:
                    return tensor
                tensor = tensor.detach().clone()  # a transfer makes another one
            _mark(tensor, gpu)
            return tensor

        if not isinstance(result, torch.Tensor) and hasattr(result, "__next__"):
            return map(mark, result)  # of Tensor.__iter__
        return tree_map_only(torch.Tensor, mark, result)
