"""The schedule is megatron-core's, value for value."""

import dataclasses

import pytest
import torch

from slime.backends.fsdp_utils.lr_scheduler import FSDPLRScheduler
from slime.training.optimizer_schedule import ScheduleSettings

BASE = ScheduleSettings(
    init_lr=1e-7,
    max_lr=1e-3,
    min_lr=1e-5,
    lr_warmup_steps=64,
    lr_decay_steps=640,
    lr_decay_style="linear",
    start_wd=0.01,
    end_wd=0.01,
    wd_incr_steps=640,
    wd_incr_style="constant",
    use_checkpoint_opt_param_scheduler=False,
    override_opt_param_scheduler=False,
    wsd_decay_steps=None,
    lr_wsd_decay_style=None,
)
VARIANTS = {
    **{style: {"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")},
    **{
        f"WSD {style}": {"lr_decay_style": "WSD", "wsd_decay_steps": 160, "lr_wsd_decay_style": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    },
    "no warm-up": {"lr_warmup_steps": 0, "init_lr": 0.0},
    "no warm-up, square root": {"lr_warmup_steps": 0, "lr_decay_style": "inverse-square-root"},
    "linear decay of weights": {"end_wd": 0.1, "wd_incr_style": "linear", "wd_incr_steps": 320},
    "cosine decay of weights": {"end_wd": 0.1, "wd_incr_style": "cosine"},
}


def optimizer():
    params = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    groups = [{"params": [params[0]], "wd_mult": 1.0}, {"params": [params[1]], "wd_mult": 0.0}]
    return torch.optim.AdamW(groups, lr=0.5)


def rates(optimizer):
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rates_and_decays_equal_those_of_megatron_core(variant):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = dataclasses.replace(BASE, **VARIANTS[variant])
    ours, theirs = optimizer(), optimizer()
    scheduler, wanted = FSDPLRScheduler(ours, settings), OptimizerParamScheduler(theirs, **vars(settings))
    for _ in range(25):
        for (rate, decay), (wanted_rate, wanted_decay) in zip(rates(ours), rates(theirs), strict=True):
            assert rate == pytest.approx(wanted_rate, rel=1e-12)
            assert decay == pytest.approx(wanted_decay, rel=1e-12)
        scheduler.step(32)
        wanted.step(32)


def test_a_loaded_schedule_goes_on_where_it_was():
    whole, resumed = optimizer(), optimizer()
    first = FSDPLRScheduler(whole, BASE)
    first.step(96)
    FSDPLRScheduler(resumed, BASE).load_state_dict(first.state_dict())
    assert rates(resumed) == rates(whole)


def test_another_schedule_is_refused_unless_it_is_said_which_counts():
    saved = FSDPLRScheduler(optimizer(), BASE)
    saved.step(96)
    other = dataclasses.replace(BASE, lr_decay_steps=1280)
    with pytest.raises(ValueError, match="lr_decay_steps 640, flags 1280"):
        FSDPLRScheduler(optimizer(), other).load_state_dict(saved.state_dict())
    flags_win = dataclasses.replace(other, override_opt_param_scheduler=True)
    checkpoint_wins = dataclasses.replace(other, use_checkpoint_opt_param_scheduler=True)
    for settings, steps in ((flags_win, 1280), (checkpoint_wins, 640)):
        scheduler = FSDPLRScheduler(optimizer(), settings)
        scheduler.load_state_dict(saved.state_dict())
        assert (scheduler.settings.lr_decay_steps, scheduler.num_steps) == (steps, 96)
