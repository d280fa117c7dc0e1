from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.optimizer import build_scheduler, ddp_config
from slime.training.optimizer_schedule import total_optimizer_steps


def _args(**overrides):
    flags = dict(num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=4)
    flags |= dict(lr=1.0, min_lr=0.0, lr_decay_style="linear", weight_decay=0.1, params_dtype=torch.float32)
    return Namespace(**{**flags, **overrides})


def _optimizer():
    return SimpleNamespace(param_groups=[{"lr": 0.0, "wd_mult": 1.0}, {"lr": 0.0, "wd_mult": 0.0}])


def test_a_run_has_its_samples_over_the_global_batch_size_steps():
    assert total_optimizer_steps(_args()) == 20
    assert total_optimizer_steps(_args(num_rollout=0)) == 1


def test_the_rate_warms_up_and_decays_over_the_run():
    optimizer = _optimizer()
    scheduler = build_scheduler(_args(lr_warmup_iters=2), optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=4)
    assert rates[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert rates[11] == pytest.approx(0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_groups_without_weight_decay_have_none():
    optimizer = _optimizer()
    build_scheduler(_args(), optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.0])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="--lr-warmup-iters 20"):
        build_scheduler(_args(lr_warmup_iters=20), _optimizer())


def test_evaluation_alone_needs_no_warm_up():
    build_scheduler(_args(num_rollout=0, lr_warmup_iters=20), _optimizer())


@pytest.mark.parametrize(
    ("overrides", "in_float32"),
    [
        ({"params_dtype": torch.bfloat16}, True),
        ({"params_dtype": torch.bfloat16, "grad_reduce_in_bf16": True}, False),
        ({"params_dtype": torch.float16}, False),
        ({"params_dtype": torch.float16, "accumulate_allreduce_grads_in_fp32": True}, True),
    ],
)
def test_bfloat16_gradients_are_summed_in_float32_unless_told_otherwise(overrides, in_float32):
    assert ddp_config(_args(**overrides)).grad_reduce_in_fp32 is in_float32


def test_only_float16_may_skip_steps_with_nan():
    assert ddp_config(_args()).check_for_nan_in_grad
    assert not ddp_config(_args(no_check_for_nan_in_loss_and_grad=True)).check_for_nan_in_grad
    assert not ddp_config(_args(params_dtype=torch.float16)).check_for_nan_in_grad


def test_a_constant_rate_may_come_from_the_checkpoint():
    """Such a schedule overrides the checkpoint's unless told otherwise, and megatron-core refuses both."""
    flags = {"lr_decay_style": "constant", "use_checkpoint_opt_param_scheduler": True}
    scheduler = build_scheduler(_args(**flags), _optimizer())
    scheduler.load_state_dict({**scheduler.state_dict(), "max_lr": 0.25, "lr_decay_steps": 7})
    assert (scheduler.max_lr, scheduler.lr_decay_steps) == (0.25, 7)
    flags["use_checkpoint_opt_param_scheduler"] = False
    scheduler = build_scheduler(_args(**flags), _optimizer())
    scheduler.load_state_dict({**scheduler.state_dict(), "max_lr": 0.25})
    assert scheduler.max_lr == 1.0
