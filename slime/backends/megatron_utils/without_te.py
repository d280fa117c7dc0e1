"""What megatron-core 0.16.1 forgets where TransformerEngine is not installed, on CPU and GPU alike."""

import types

_NAMES = {
    # The router asks whether it is None, but it is not defined at all.
    "megatron.core.transformer.moe.moe_utils": ("te_general_gemm",),
}


def treat(module: types.ModuleType) -> None:
    """Defines as None what a module of megatron-core tests for."""
    for name in _NAMES.get(module.__name__, ()):
        vars(module).setdefault(name, None)
