"""One step of each rule against its formula in float64, whichever way moments are kept."""

import pytest
import torch

from slime.backends.megatron_utils.fused_adam import FusedAdam
from slime.backends.megatron_utils.moment_storage import MomentStorage
from slime.backends.megatron_utils.update_rules import Adam, Sgd, StatelessAdam
from slime.utils.accelerator import CopyLane

SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1}
AWAY = {"host_fraction": 1.0, "is_away": lambda tensor: True}


def run(rule, steps=4, storage=None, shapes=((5, 3), (7,)), dtype=torch.float32):
    """The weights after some steps with random gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    optimizer = FusedAdam(params, **SETTINGS)
    optimizer.arrange(rule, storage or MomentStorage())
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()
    return optimizer, [param.detach() for param in params]


def by_formula(step, steps=4, shapes=((5, 3), (7,))):
    """Takes the steps by ``step(weight, gradient, state, number)`` in float64."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).double() for shape in shapes]
    states = [{} for _ in weights]
    for number in range(1, steps + 1):
        for i, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator).double()
            weights[i] = step(weight, gradient, states[i], number)
    return weights


def adam(decoupled):
    def step(weight, gradient, state, number):
        if decoupled:
            weight = weight * (1 - 0.1 * 0.1)
        else:
            gradient = gradient + 0.1 * weight
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * gradient
        state["v"] = 0.95 * state.get("v", 0) + 0.05 * gradient**2
        first, second = state["m"] / (1 - 0.8**number), state["v"] / (1 - 0.95**number)
        return weight - 0.1 * first / (second.sqrt() + 1e-2)

    return step


def stateless(decoupled):
    def step(weight, gradient, state, number):
        return adam(decoupled)(weight, gradient, {}, 1)

    return step


def sgd(momentum):
    def step(weight, gradient, state, number):
        gradient = gradient + 0.1 * weight
        state["b"] = momentum * state.get("b", 0) + gradient
        return weight - 0.1 * state["b"]

    return step


RULES = [
    (Adam(), adam(True)),
    (Adam(decoupled=False), adam(False)),
    (StatelessAdam(), stateless(True)),
    (StatelessAdam(decoupled=False), stateless(False)),
    (Sgd(0.9), sgd(0.9)),
    (Sgd(0.0), sgd(0.0)),
]


@pytest.mark.parametrize(("rule", "formula"), RULES, ids=[repr(rule) for rule, _ in RULES])
def test_steps_follow_the_formula(rule, formula):
    for found, expected in zip(run(rule)[1], by_formula(formula), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_torch(momentum):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, weight_decay=0.1)
    for _ in range(4):
        weight.grad = torch.randn(5, 3, generator=generator)
        optimizer.step()
    torch.testing.assert_close(run(Sgd(momentum), shapes=((5, 3),))[1][0], weight.detach())


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=repr)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_steps_on_the_host_are_the_same_to_the_last_bit(rule, overlap, fraction):
    storage = MomentStorage(overlap=overlap, **{**AWAY, "host_fraction": fraction})
    optimizer, away = run(rule, storage=storage)
    _, here = run(rule)
    assert all(torch.equal(*pair) for pair in zip(away, here, strict=True))
    assert len(optimizer._host_steps._buffers) == (2 if fraction == 1 else 1)


def test_without_a_gpu_everything_is_on_the_host_already():
    optimizer, _ = run(Adam(), storage=MomentStorage(host_fraction=1.0))
    assert optimizer._on_host == set()
    assert optimizer._host_steps._buffers == {}


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_the_first_parameters_up_to_the_fraction_go_to_the_host(fraction):
    params = [torch.empty(size) for size in (4, 2, 2, 2)]
    chosen = MomentStorage(**{**AWAY, "host_fraction": fraction}).offloaded(params)
    sizes = {0.0: [], 0.3: [4], 0.5: [4, 2], 1.0: [4, 2, 2, 2]}[fraction]
    assert [param.numel() for param in chosen] == sizes


def test_moments_of_bfloat16_take_half_the_memory_and_little_of_the_precision():
    formats = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    optimizer, narrow = run(Adam(), storage=MomentStorage(formats))
    _, wide = run(Adam())
    for state in optimizer.state.values():
        assert {moment.dtype for moment in state.values()} == {torch.bfloat16}
    for found, expected in zip(narrow, wide, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
        assert not torch.equal(found, expected)


def test_a_rule_without_moments_keeps_none():
    optimizer, _ = run(StatelessAdam())
    assert all(state == {} for state in optimizer.state.values())


@pytest.mark.parametrize("storage", [MomentStorage(), MomentStorage({"exp_avg": torch.bfloat16}, **AWAY)])
def test_a_loaded_state_goes_on_where_the_saved_one_was(storage):
    saved, _ = run(Adam(), storage=storage)
    fresh, _ = run(Adam(), steps=0, storage=storage)
    fresh.load_state_dict(saved.state_dict())
    assert fresh.param_groups[0]["step"] == 4
    for old, new in zip(saved.state.values(), fresh.state.values(), strict=True):
        assert old.keys() == new.keys()
        for name in old:
            assert torch.equal(old[name], new[name]) and old[name] is not new[name]
            assert new[name].dtype == storage.formats.get(name, torch.float32)


def test_a_copy_without_a_gpu_is_done_when_the_call_returns():
    lane, target = CopyLane(beside=True), torch.zeros(3)
    lane.copy(target, torch.ones(3))()
    lane.join()
    assert target.tolist() == [1, 1, 1]
