from argparse import Namespace

import pytest

from slime.training.invariants import InvariantError, check_invariants

GOOD = {"train/ppo_kl": 0.0, "train/kl_loss": 0.0, "train/train_rollout_logprob_abs_diff": 0.01}


def _args(**overrides):
    flags = {"ci_disable_kl_checker": False, "ci_train_rollout_logprob_abs_diff_threshold": 0.1}
    flags |= {"use_rollout_logprobs": False, "keep_old_actor": False, "use_kl_loss": True}
    flags |= {"use_rollout_routing_replay": False, "replays_nucleus": False}
    return Namespace(**{**flags, **overrides})


def test_a_healthy_rollout_passes():
    check_invariants(_args(), 0, [GOOD, {**GOOD, "train/ppo_kl": 0.1}])
    check_invariants(_args(), 1, [{**GOOD, "train/kl_loss": 0.1}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train/ppo_kl", 1e-3),
        ("train/kl_loss", 1e-3),
        ("train/train_rollout_logprob_abs_diff", 0.2),
        ("train/train_rollout_logprob_abs_diff", float("nan")),
    ],
)
def test_a_broken_invariant_is_named(name, value):
    with pytest.raises(InvariantError, match=name):
        check_invariants(_args(), 0, [{**GOOD, name: value}])


@pytest.mark.parametrize("name", GOOD)
def test_a_metric_that_is_missing_breaks_its_invariant(name):
    step = {other: value for other, value in GOOD.items() if other != name}
    with pytest.raises(InvariantError, match=f"no {name} at rollout 0"):
        check_invariants(_args(), 0, [step])


def test_only_metrics_that_the_flags_ask_for_can_be_missing():
    gap = {"train/train_rollout_logprob_abs_diff": 0.01}
    check_invariants(_args(use_kl_loss=False), 0, [{**gap, "train/ppo_kl": 0.0}])
    check_invariants(_args(ci_disable_kl_checker=True), 0, [gap])
    check_invariants(_args(use_rollout_logprobs=True), 0, [gap])


def test_checks_on_kl_can_be_left_out():
    check_invariants(_args(ci_disable_kl_checker=True), 0, [{**GOOD, "train/ppo_kl": 1.0}])
