"""Which optimizer flags make, what decays in it, and the arithmetic around its steps."""

import pytest
import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.optimizer import (
    build_optimizer,
    clip_factor,
    ensure_states,
    gradient_norm,
    local,
    parameters_of,
    reset_states,
    scale,
)
from tests.run_args import config_with

ADAM = {"lr": 0.25, "adam_beta1": 0.5, "adam_beta2": 0.75, "adam_eps": 0.125}


def model_of(*names):
    """Matrices and vectors by their names, and a matrix that does not train."""
    model = torch.nn.Module()
    for name in names:
        shape = (2, 3) if name[0] in "mb" else (3,)
        model.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))
    model.register_parameter("mfrozen", torch.nn.Parameter(torch.ones(2, 2), requires_grad=False))
    return model


def built(names=("m1", "vnorm", "bias", "m2"), **flags):
    model = model_of(*names)
    optimizer = build_optimizer(config_with(**{**ADAM, **flags}), model)
    named = {id(param): name for name, param in model.named_parameters()}
    return optimizer, [(g["wd_mult"], [named[id(p)] for p in g["params"]]) for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("decoupled", "kind"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)], ids=["beside", "within"]
)
def test_adam_is_fused_and_has_the_values_of_its_flags(decoupled, kind):
    optimizer, _ = built(decoupled_weight_decay=decoupled)
    assert type(optimizer) is kind
    found = optimizer.param_groups[0]
    wanted = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "fused": True, "amsgrad": False}
    assert {name: found[name] for name in wanted} == wanted


def test_norms_and_biases_do_not_decay_and_what_is_frozen_is_left_out():
    optimizer, groups = built()
    assert groups == [(1.0, ["m1", "m2"]), (0.0, ["vnorm", "bias"])]
    assert len([*parameters_of(optimizer)]) == 4
    assert built(("m1",))[1] == [(1.0, ["m1"])] and built(("vnorm",))[1] == [(0.0, ["vnorm"])]


def test_gradient_descent_has_its_momentum():
    optimizer, _ = built(optimizer="sgd", sgd_momentum=0.75)
    assert type(optimizer) is torch.optim.SGD
    assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.25, 0.75)}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, {"step", "exp_avg", "exp_avg_sq"}),
        ({"optimizer": "sgd", "sgd_momentum": 0.5}, {"momentum_buffer"}),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, set()),
    ],
    ids=["Adam", "momentum", "no momentum"],
)
def test_states_that_no_step_has_made_are_zero_and_change_nothing(flags, names):
    weights = []
    for first in (False, True):
        optimizer, _ = built(**flags)
        if first:
            ensure_states(optimizer)
            for param in parameters_of(optimizer):
                assert {*optimizer.state[param]} == names
                assert all(not bool(value.any()) for value in optimizer.state[param].values())
        for _ in range(2):
            for param in parameters_of(optimizer):
                param.grad = torch.arange(param.numel()).view(param.shape) - 1.0
            optimizer.step()
        ensure_states(optimizer)  # what a step has made stays
        weights.append([param.detach().clone() for param in parameters_of(optimizer)])
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert not names or any(bool(value.any()) for value in kept)
        reset_states(optimizer)
        assert not any(bool(value.any()) for value in kept)
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("norm", "largest", "factor"),
    [(2.0, 1.0, 1 / (2 + 1e-6)), (1.0, 2.0, 1.0), (0.0, 1.0, 1.0), (9.0, 0.0, 1.0), (1e-6, 1e-6, 0.5)],
)
def test_gradients_are_clipped_as_torch_clips_them(norm, largest, factor):
    assert clip_factor(norm, largest) == pytest.approx(factor, rel=1e-12)
    if norm and largest:
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        weight.grad = torch.full((4,), norm / 2, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([weight], largest)
        assert float(weight.grad[0]) == pytest.approx(norm / 2 * clip_factor(norm, largest), rel=1e-9)


def test_gradients_are_multiplied_in_place():
    gradients = [torch.ones(2), torch.full((3,), 2.0)]
    scale(iter(gradients), 0.5)
    assert [gradient.tolist() for gradient in gradients] == [[0.5] * 2, [1.0] * 3]
    scale(gradients, 1.0)
    scale([], 0.5)
    assert [gradient.tolist() for gradient in gradients] == [[0.5] * 2, [1.0] * 3]


def test_the_norm_is_over_all_gradients_and_in_float32(monkeypatch):
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda total: reduced.append(float(total)) or total.mul_(4))
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0, 12.0]], dtype=torch.bfloat16)]
    assert gradient_norm(gradients, torch.device("cpu")) == pytest.approx(2 * 13.0)
    assert reduced == [pytest.approx(169.0)]
    assert gradient_norm([], torch.device("cpu")) == 0.0


def test_a_plain_tensor_is_its_own_shard_without_gradients():
    param = torch.nn.Parameter(torch.ones(2))
    shard = local(param)
    assert not shard.requires_grad and shard.data_ptr() == param.data_ptr()
