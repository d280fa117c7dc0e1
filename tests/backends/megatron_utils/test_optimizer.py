from types import SimpleNamespace

import pytest
import torch

from slime.arguments.groups.critic import of_critic
from slime.backends.fsdp_utils.lr_scheduler import FSDPLRScheduler
from slime.backends.megatron_utils.optimizer import build_scheduler, ddp_config
from slime.config.critic import trains_actor
from slime.config.run import run_config
from slime.training.optimizer_schedule import schedule_settings, total_optimizer_steps
from tests.run_args import with_groups


def _args(**overrides):
    flags = dict(num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=4)
    flags |= dict(lr=1.0, min_lr=0.0, lr_decay_style="linear", weight_decay=0.1, params_dtype=torch.float32)
    return with_groups({**flags, **overrides})


def _config(**overrides):
    return run_config(_args(**overrides))


def _optimizer():
    return SimpleNamespace(param_groups=[{"lr": 0.0, "wd_mult": 1.0}, {"lr": 0.0, "wd_mult": 0.0}])


def test_a_run_has_its_samples_over_the_global_batch_size_steps():
    assert total_optimizer_steps(run_config(_args())) == 20
    assert total_optimizer_steps(run_config(_args(num_rollout=0))) == 1


def test_the_rate_warms_up_and_decays_over_the_run():
    optimizer = _optimizer()
    scheduler = build_scheduler(_config(lr_warmup_iters=2), optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=4)
    assert rates[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert rates[11] == pytest.approx(0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


SCHEDULERS = {
    "megatron": lambda args, optimizer: build_scheduler(run_config(args), optimizer),
    "fsdp": lambda args, optimizer: FSDPLRScheduler(optimizer, schedule_settings(run_config(args))),
}


@pytest.mark.parametrize("backend", SCHEDULERS)
def test_lr_decay_iters_says_how_many_steps_the_decay_has(backend):
    args, optimizer = _args(lr_decay_iters=8, lr_warmup_fraction=0.25, min_lr=0.1), _optimizer()
    scheduler = SCHEDULERS[backend](args, optimizer)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=4)
    assert rates == pytest.approx([0, 0.5, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1])
    assert schedule_settings(run_config(args)).wd_incr_steps == 20 * 4


_CRITIC = dict(
    critic_load=None, critic_save=None, critic_lr=2.0, critic_lr_warmup_iters=0, critic_resumes=True
)


def _rates_of(role, args, backend, stop):
    """Returns the rates of each rollout (two steps) in which a role trains; resumed after ``stop``."""
    seen, own = args if role == "actor" else of_critic(args), []
    optimizer = _optimizer()
    scheduler = SCHEDULERS[backend](seen, optimizer)
    for rollout_id in range(args.num_rollout):
        if rollout_id == stop:
            saved, optimizer = scheduler.state_dict(), _optimizer()
            scheduler = SCHEDULERS[backend](seen, optimizer)
            scheduler.load_state_dict(saved)
            scheduler.step(0)
        if role == "actor" and not trains_actor(run_config(args).critic, rollout_id):
            continue
        for _ in range(2):
            own.append(optimizer.param_groups[0]["lr"])
            scheduler.step(increment=4)
    return own


@pytest.mark.parametrize("backend", SCHEDULERS)
@pytest.mark.parametrize("stop", [None, 3, 8])
def test_the_schedule_of_a_role_counts_the_steps_in_which_it_trains(backend, stop):
    """The critic trains alone for 6 of 10 rollouts; then the actor's rate goes down over the other 4."""
    args = _args(use_critic=True, num_critic_only_steps=6, critic_train_only=False, **_CRITIC)
    actor, critic = (_rates_of(role, args, backend, stop) for role in ("actor", "critic"))
    assert actor == pytest.approx([1 - step / 8 for step in range(8)])
    assert critic == pytest.approx([2 - step / 10 for step in range(20)])


def test_a_warm_up_is_shorter_than_the_steps_of_its_role():
    alone = dict(use_critic=True, num_critic_only_steps=6, critic_train_only=False)
    with pytest.raises(ValueError, match="--lr-warmup-iters 8: wanted less than the 8 steps"):
        schedule_settings(run_config(_args(**alone, lr_warmup_iters=8)))
    schedule_settings(run_config(_args(**alone | {"use_critic": False}, lr_warmup_iters=8)))
    never = _args(**alone | {"num_critic_only_steps": 10}, lr_warmup_iters=8)
    schedule_settings(run_config(never))


def test_groups_without_weight_decay_have_none():
    optimizer = _optimizer()
    build_scheduler(_config(), optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.0])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="--lr-warmup-iters 20"):
        build_scheduler(_config(lr_warmup_iters=20), _optimizer())


def test_evaluation_alone_needs_no_warm_up():
    build_scheduler(_config(num_rollout=0, lr_warmup_iters=20), _optimizer())


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
    assert ddp_config(_config(**overrides)).grad_reduce_in_fp32 is in_float32


def test_only_float16_may_skip_steps_with_nan():
    assert ddp_config(_config()).check_for_nan_in_grad
    assert not ddp_config(_config(no_check_for_nan_in_loss_and_grad=True)).check_for_nan_in_grad
    assert not ddp_config(_config(params_dtype=torch.float16)).check_for_nan_in_grad


def test_a_constant_rate_may_come_from_the_checkpoint():
    """Such a schedule overrides the checkpoint's unless told otherwise, and megatron-core refuses both."""
    flags = {"lr_decay_style": "constant", "use_checkpoint_opt_param_scheduler": True}
    scheduler = build_scheduler(_config(**flags), _optimizer())
    scheduler.load_state_dict({**scheduler.state_dict(), "max_lr": 0.25, "lr_decay_steps": 7})
    assert (scheduler.max_lr, scheduler.lr_decay_steps) == (0.25, 7)
    flags["use_checkpoint_opt_param_scheduler"] = False
    scheduler = build_scheduler(_config(**flags), _optimizer())
    scheduler.load_state_dict({**scheduler.state_dict(), "max_lr": 0.25})
    assert scheduler.max_lr == 1.0
