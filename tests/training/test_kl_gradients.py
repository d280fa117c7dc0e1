"""Which estimators of the KL have the gradient of a KL: exact expectations over a small vocabulary.

A response of one token, once for every token of the vocabulary, weighted with its probability: what comes out
is the expectation itself, not an estimate of it.
"""

from itertools import product
from typing import get_args

import pytest
import torch

from slime.arguments.core.flag import flags_of
from slime.arguments.groups.kl import CONFIG_GROUP, LOSS_ESTIMATORS, REWARD_ESTIMATORS
from slime.config.kl import KlConfig
from slime.config.run import run_config
from slime.training.advantages import compute_advantages_and_returns
from slime.training.kl import KL_TYPES
from slime.training.losses.policy import policy_loss_function
from slime.training.parallel import ParallelContext
from tests.run_args import run_args
from tests.trainer_batches import _FLAGS

POLICY = torch.tensor([0.3, -0.7, 1.1, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.6, -1.0, 0.3], dtype=torch.float64)
VOCAB = len(POLICY)
COMBINATIONS = [*product(KL_TYPES, (False, True))]


def _args(**overrides):
    return run_args(**{**_FLAGS, "vocab_size": VOCAB, **overrides})


def _kl_gradient(forwards):
    """Differentiates KL(policy || reference), or KL(reference || policy), by the policy's logits."""
    logits = POLICY.clone().requires_grad_()
    policy, reference = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
    p, q = (policy, reference) if forwards else (reference, policy)
    (p.exp() * (p - q)).sum().backward()
    return logits.grad


def _expected_gradient(args):
    """Differentiates the policy loss, over tokens of the policy, in one optimizer step."""
    logits = POLICY.float().requires_grad_()
    probabilities = POLICY.softmax(-1)
    reference = REFERENCE.log_softmax(-1).float()
    own = POLICY.log_softmax(-1).float()
    batch = {
        "unconcat_tokens": [torch.tensor([0, token]) for token in range(VOCAB)],
        "total_lengths": [2] * VOCAB,
        "response_lengths": [1] * VOCAB,
        "loss_masks": [torch.ones(1, dtype=torch.int)] * VOCAB,
        "rewards": [0.0] * VOCAB,
        "ref_log_probs": [*reference[:, None]],
        "log_probs": [*own[:, None]],
    }
    compute_advantages_and_returns(run_config(args), batch, ParallelContext())
    rows = logits.expand(2 * VOCAB, -1)[None]
    expectation = lambda values: (values * probabilities).sum()
    policy_loss_function(run_config(args), batch, rows, expectation, ParallelContext())[0].backward()
    return logits.grad.double()


def _equal(found, wanted):
    return torch.allclose(found, wanted, rtol=0, atol=1e-6)


def _is_noted(**overrides):
    unset = dict(ref_load=None, ref_ckpt_step=None, disable_compute_advantages_and_returns=False)
    args = _args(loss_type="policy_loss", **unset, **overrides)
    assert not [*CONFIG_GROUP.contradictions(args)]
    return any("--kl-loss-type" in note for note in CONFIG_GROUP.notes(args))


@pytest.mark.parametrize(("kind", "unbiased"), COMBINATIONS)
def test_a_kl_loss_runs_without_a_note_if_its_gradient_is_that_of_a_kl(kind, unbiased):
    flags = dict(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=unbiased)
    found = _expected_gradient(_args(**flags))
    # Without the ratio k3 pulls with KL(reference || policy), as in the GRPO paper.
    wanted = _kl_gradient(forwards=unbiased or kind == "k2")
    assert _equal(found, wanted) == ((kind, unbiased) in LOSS_ESTIMATORS)
    assert _is_noted(**flags) == ((kind, unbiased) not in LOSS_ESTIMATORS)
    assert not _is_noted(**{**flags, "kl_loss_coef": 0.0})


def test_a_noted_kl_loss_has_no_kl_for_its_gradient_at_all():
    k1 = _expected_gradient(_args(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k1"))
    assert k1.abs().max() < 1e-6
    flags = dict(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2", use_unbiased_kl=True)
    k2 = _expected_gradient(_args(**flags))
    assert not any(_equal(k2, _kl_gradient(forwards)) for forwards in (True, False))


@pytest.mark.parametrize("kind", KL_TYPES)
def test_a_kl_in_the_reward_runs_without_a_note_if_its_gradient_is_that_of_the_kl(kind):
    flags = dict(advantage_estimator="reinforce_plus_plus", kl_coef=1.0, kl_loss_type=kind)
    found = _expected_gradient(_args(**flags))
    assert _equal(found, _kl_gradient(forwards=True)) == (kind in REWARD_ESTIMATORS)
    assert _is_noted(**flags) == (kind not in REWARD_ESTIMATORS)
    assert not _is_noted(**flags, custom_advantage_function_path="a.b")


def test_every_estimator_that_can_be_named_was_tried():
    (flag,) = [flag for flag in flags_of(KlConfig) if flag.dest == "kl_loss_type"]
    assert get_args(flag.type) == KL_TYPES
