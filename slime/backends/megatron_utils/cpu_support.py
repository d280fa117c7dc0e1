"""Runs megatron-core 0.16.1 on machines without a GPU. With CUDA nothing here does anything: skip this file.

megatron-core computes with plain torch and torch.distributed, both of which work on CPU and gloo; what fails
are the places that name CUDA. Everything is replaced from outside, as `import_hook` sees it imported, in
four kinds:

1. ``torch.cuda`` entry points that raise on a CPU build. Process-wide, which hurts nobody: without CUDA
   there is no other user of them.
2. ``torch.Tensor`` methods: ``type()`` (compared with ``"torch.cuda.FloatTensor"`` in clip_grads.py:167,
   optimizer.py:671 and distrib_optimizer.py:361), ``cuda``, ``pin_memory``, ``record_stream``.
3. The global ``torch`` of ``megatron.core`` modules: a proxy that maps ``device="cuda"`` and
   ``pin_memory=True`` in factory functions to CPU (schedules.py:596, optimizer.py:481, clip_grads.py:103,
   utils.py:1207, ...). A proxy, so that transformers or Ray in the same process see the real torch.
4. Single names in single modules (`_module_fixes`): the RNG accessors; and the JIT, because torch.compile
   needs a C++ compiler and costs half a minute.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "eye", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)


def prepare() -> None:
    """Makes torch answer for CUDA on the CPU; to be called before megatron-core is imported."""
    if not torch.cuda.is_available():
        _patch_torch_cuda()
        _patch_tensor()


class _Stream:
    """Stands in for a CUDA stream: work on the CPU is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _patch_torch_cuda() -> None:
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        # Not torch.manual_seed, which calls torch.cuda.manual_seed_all itself.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream=None: contextlib.nullcontext(),
    }
    # A function of its own for each name: torch._dynamo refuses one object under two names.
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"):
        replacements[name] = lambda *_, **__: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replacements[name] = lambda device=None: 0
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


class _TypeName(str):
    """``torch.FloatTensor`` that also equals ``torch.cuda.FloatTensor``; it prints as itself."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _patch_tensor() -> None:
    original_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return _TypeName(original_type(self))
        return original_type(self, dtype, *args, **kwargs)

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    for target, name, value in (
        (torch.Tensor, "type", type_),
        (torch.Tensor, "cuda", stay),
        (torch.Tensor, "pin_memory", stay),
        (torch.Tensor, "record_stream", lambda self, stream: None),
        (torch.nn.Module, "cuda", stay),
    ):
        setattr(target, name, value)


class _TorchProxy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


@functools.cache
def _torch_proxy() -> types.ModuleType:
    proxy = _TorchProxy("torch")
    for name in _FACTORIES:
        setattr(proxy, name, _on_cpu(getattr(torch, name)))

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
        return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    vars(proxy)["autocast"] = autocast
    return proxy


def treat(module: types.ModuleType) -> None:
    """Replaces what a module of megatron-core cannot do on the CPU."""
    if torch.cuda.is_available():
        return
    if getattr(module, "torch", None) is torch:
        vars(module)["torch"] = _torch_proxy()
    for name, value in list(vars(module).items()):
        # Present only in modules that were imported before they could be treated.
        plain = getattr(value, "_torchdynamo_orig_callable", None)
        if plain is not None:
            setattr(module, name, plain)
    _module_fixes().get(module.__name__, lambda _: None)(module)


@functools.cache
def _module_fixes() -> dict[str, Callable[[types.ModuleType], None]]:
    return {
        "megatron.core.jit": lambda module: module.disable_jit_fuser(),
        "megatron.core.tensor_parallel.random": _use_cpu_rng,
        "megatron.core.tensor_parallel.mappings": _gather_uneven_parts,
        "megatron.core.transformer.moe.token_dispatcher": _use_lists_for_sizes,
    }


def _use_lists_for_sizes(module: types.ModuleType) -> None:
    """Sizes of all-to-all parts become numpy arrays when they leave the GPU, where these never were."""

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    vars(module)["maybe_move_tensor_to_cpu"] = moved


def _gather_uneven_parts(module: types.ModuleType) -> None:
    """gloo has no all-gather of parts of different lengths."""
    names = vars(module)
    plain = names["_gather_along_first_dim"]

    def gather(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        sizes = [int(size) for size in (output_split_sizes if output_split_sizes is not None else ())]
        if group.size() == 1 or len(set(sizes)) < 2:
            return plain(input_, group, sizes or None, use_global_buffer)
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    names["_gather_along_first_dim"] = gather


def _use_cpu_rng(module: types.ModuleType) -> None:
    names = vars(module)
    names["_get_cuda_rng_state"] = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    names["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Every fork of the model-parallel generator changes the CPU generator: here they are the same one.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG" not in record.getMessage()
    )
