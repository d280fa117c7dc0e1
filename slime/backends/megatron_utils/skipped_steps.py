"""Steps that are skipped because of their gradients: one verdict for all weights on all ranks."""

import math

from megatron.core.optimizer import MegatronOptimizer


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """One loss scale of float16 for the weights of experts and all others.

    megatron-core 0.16 gives each of its optimizers a scale that falls when that optimizer's own gradients
    overflow. But the loss is multiplied by the first one's alone, so the gradients of the others would be
    divided by another factor from the first overflow on that not all of them share.
    """
    parts = [part for part in getattr(optimizer, "chained_optimizers", ()) if part.grad_scaler is not None]
    if len(parts) < 2:
        return
    scaler, prepare = parts[0].grad_scaler, optimizer.prepare_grads
    update = scaler.update

    def prepared() -> bool:
        overflow = prepare()
        update(overflow)
        return overflow

    vars(scaler)["update"] = lambda found_inf: None  # each part would, after its own gradients
    for part in parts:
        part.grad_scaler = scaler
    vars(optimizer)["prepare_grads"] = prepared


def skip_not_finite(optimizer: MegatronOptimizer) -> None:
    """Skips steps with NaN or infinity in their gradients, which megatron-core takes without a loss scale."""
    prepare = optimizer.prepare_grads

    def prepared() -> bool:
        return prepare() or not math.isfinite(float(optimizer.get_grad_norm()))

    vars(optimizer)["prepare_grads"] = prepared
