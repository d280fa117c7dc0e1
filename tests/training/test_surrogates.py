"""What holds for every surrogate of the policy loss, and for those that clip."""

import pytest
import torch

from slime.config.loss import SURROGATES
from slime.config.run import run_config
from slime.training.losses.surrogates.tokens import PolicyTokens
from slime.utils.misc import load_function
from tests.training.cases import flags

MASKS = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0])]
ADVANTAGES = [torch.tensor([1.5, 1.5, 1.5, 1.5]), torch.tensor([-0.5, -0.5])]


def _tokens(old_minus_new: float) -> PolicyTokens:
    new = [torch.tensor([-1.0, -0.3, -2.0, -0.7]), torch.tensor([-0.1, -4.0])]
    old = [values + old_minus_new for values in new]
    return PolicyTokens([values.requires_grad_() for values in new], old, ADVANTAGES, MASKS)


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_a_sequence_gets_the_gradient_of_reinforce(name) -> None:
    """The gradient with respect to a trained log-prob is -A where all ratios are 1."""
    tokens = _tokens(0.0)
    found = load_function(SURROGATES[name])(run_config(flags(surrogate=name)).loss, tokens)
    assert found.loss.shape == found.log_ratio.shape == found.clipped.shape == (6,)
    assert not found.clipped.any() and not found.log_ratio.any()
    (found.loss * torch.cat(MASKS)).sum().backward()
    for new, advantages, mask in zip(tokens.new, ADVANTAGES, MASKS, strict=True):
        assert new.grad is not None
        torch.testing.assert_close(new.grad, -advantages * mask)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("distance", [-3.0, 3.0])
def test_far_from_the_old_policy_the_ratio_is_clipped(name, distance) -> None:
    found = load_function(SURROGATES[name])(run_config(flags(surrogate=name)).loss, _tokens(distance))
    trained = torch.cat(MASKS) != 0
    gains = torch.cat(ADVANTAGES) > 0
    # PPO bounds what a ratio can gain, CISPO the ratio.
    bound = torch.ones(6, dtype=torch.bool) if name == "cispo" else gains == (distance < 0)
    assert found.clipped[trained].tolist() == bound[trained].float().tolist()
