"""Losses for plug-ins, laid out as in the trainer; elsewhere as this module's ``mpu`` says."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import context_by, held_mpu
from slime.training import loss_plugins
from slime.training.estimators.distillation import apply_opd_kl_to_advantages
from slime.training.log_probs import drain_captured_log_probs, enable_log_prob_capture, response_log_probs
from slime.training.losses.corrections import icepop_function, vanilla_tis_function
from slime.training.losses.scaling import loss_function

__all__ = [
    "_build_topp_keep_mask",
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "drain_captured_log_probs",
    "enable_log_prob_capture",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "response_log_probs",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]

__getattr__ = partial(held_mpu, __name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _laid_out(function: _Function, gathers: bool = True) -> _Function:
    """Returns the function with the layout of the moment in which it is called."""

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{"context": context_by(__name__, gathers), **options})

    return called  # type: ignore[return-value]


_build_topp_keep_mask = _laid_out(loss_plugins.build_topp_keep_mask, gathers=False)


@wraps(loss_plugins.compute_advantages_and_returns)
def compute_advantages_and_returns(*arguments: Any, **options: Any) -> None:
    """See `slime.training.loss_plugins.compute_advantages_and_returns`."""
    ranks = dist.is_initialized()  # else each rank has to be able to do it alone
    context = context_by(__name__, gathers=ranks, whitens=ranks)
    loss_plugins.compute_advantages_and_returns(*arguments, **{"context": context, **options})


get_log_probs_and_entropy = _laid_out(loss_plugins.get_log_probs_and_entropy)
get_values = _laid_out(loss_plugins.get_values)
policy_loss_function = _laid_out(loss_plugins.policy_loss_function)
sft_loss_function = _laid_out(loss_plugins.sft_loss_function)
value_loss_function = _laid_out(loss_plugins.value_loss_function)
