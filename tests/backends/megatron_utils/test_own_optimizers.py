"""Optimizers of ours with what they take for what nobody says, against torch's and against formulas."""

import math

import pytest
import torch

from slime.backends.megatron_utils.fused_adam import FusedAdam
from slime.backends.megatron_utils.stateless_adam import StatelessAdam

START = torch.tensor([1.0, -2.0, 0.5, 3.0])
GRADIENTS = torch.tensor([[0.5, -1e-8, 0.0, 2.0], [1.0, 1e-8, -3.0, 0.25], [-0.5, 3e-8, 1.0, 1.0]])


def stepped(kind, count=3, **options):
    """The weights after some steps."""
    weight = torch.nn.Parameter(START.clone())
    idle = torch.nn.Parameter(START.clone())  # without a gradient
    optimizer = kind([weight, idle], **options)
    for gradient in GRADIENTS[:count]:
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(idle, START)
    return weight.detach()


@pytest.mark.parametrize("options", [{}, {"lr": 0.1}, {"eps": 0.5, "betas": (0.5, 0.75)}], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_is_that_of_torch(options, decay, decoupled):
    found = stepped(FusedAdam, weight_decay=decay, adam_w_mode=decoupled, **options)
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch.testing.assert_close(found, stepped(reference, weight_decay=decay, **options), rtol=1e-7, atol=1e-7)


def test_by_default_weights_do_not_decay_and_would_beside_the_gradient():
    assert torch.equal(stepped(FusedAdam), stepped(FusedAdam, weight_decay=0.0))
    assert torch.equal(
        stepped(FusedAdam, weight_decay=0.5), stepped(FusedAdam, weight_decay=0.5, adam_w_mode=True)
    )


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"bias_correction": False}])
def test_what_the_kernel_has_not_is_refused(options):
    with pytest.raises(ValueError, match="wanted bias_correction=True and amsgrad=False"):
        FusedAdam([torch.nn.Parameter(START.clone())], **options)
    FusedAdam([torch.nn.Parameter(START.clone())], bias_correction=True, amsgrad=False)


def by_formula(
    lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True, adam_w_mode=True
):
    """Three steps of Adam that begin with moments of zero, in float64."""
    weight = START.double()
    for gradient in GRADIENTS.double():
        if not adam_w_mode:
            gradient = gradient + weight_decay * weight
        first, second = (1 - betas[0]) * gradient, (1 - betas[1]) * gradient**2
        if bias_correction:
            first, second = first / (1 - betas[0]), second / (1 - betas[1])
        if adam_w_mode:
            weight = weight * (1 - lr * weight_decay)
        weight = weight - lr * first / (second.sqrt() + eps)
    return weight


OPTIONS = [
    {},
    {"lr": 0.1},
    {"eps": 0.5},
    {"weight_decay": 0.25, "lr": 0.1},
    {"weight_decay": 0.25, "lr": 0.1, "adam_w_mode": False},
    {"bias_correction": False},
    {"bias_correction": False, "lr": 0.1, "betas": (0.5, 0.75), "eps": 0.1},
    {"bias_correction": False, "lr": 0.1, "weight_decay": 0.25},
    {"bias_correction": False, "lr": 0.1, "weight_decay": 0.25, "adam_w_mode": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_without_moments_follow_the_formula(options):
    found = stepped(StatelessAdam, **options).double()
    torch.testing.assert_close(found, by_formula(**options), rtol=1e-6, atol=1e-6)


def test_a_closure_makes_the_gradients_and_its_loss_is_returned():
    for kind in (StatelessAdam, FusedAdam):
        weight = torch.nn.Parameter(torch.tensor([4.0]))
        optimizer = kind([weight], lr=0.5)

        def closure(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = (weight**2).sum()
            loss.backward()
            return loss.detach()

        assert float(optimizer.step(closure)) == 16.0
        assert math.isclose(float(weight.detach()), 3.5, rel_tol=1e-6)
        assert optimizer.step() is None
    gradients_are_on = []
    StatelessAdam([torch.nn.Parameter(START.clone())]).step(
        lambda: gradients_are_on.append(torch.is_grad_enabled())
    )
    assert gradients_are_on == [True]


def test_a_maximum_over_steps_is_refused():
    with pytest.raises(ValueError, match="amsgrad: keeps a maximum over steps"):
        StatelessAdam([torch.nn.Parameter(START.clone())], amsgrad=True)
