"""What megatron-core 0.16.1 forgets where TransformerEngine is not installed, on CPU and GPU alike."""

import types

_NAMES = {
    # The router asks whether it is None, but it is not defined at all.
    "megatron.core.transformer.moe.moe_utils": ("te_general_gemm",),
}
# This module believes that it is installed, and looks for instances of one of its classes.
_BELIEVER, _CLASS = "megatron.core.transformer.multi_latent_attention", "TELinear"
# Recomputing norms asks TransformerEngine about float8, unless its class is told None of it.
_ASKER = "megatron.core.tensor_parallel.random"


def treat(module: types.ModuleType) -> None:
    """Defines as None what a module of megatron-core tests for, and mends a wrong test."""
    for name in _NAMES.get(module.__name__, ()):
        vars(module).setdefault(name, None)
    if module.__name__ == _BELIEVER and not isinstance(vars(module)[_CLASS], type):
        vars(module)["HAVE_TE"] = False
    if module.__name__ == _ASKER and not vars(module)["HAVE_TE"]:
        vars(module)["CheckpointWithoutOutput"].__init__.__defaults__ = (None,)
