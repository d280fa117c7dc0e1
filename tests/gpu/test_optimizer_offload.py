"""Moments on the host beside a GPU: where they are, and that steps are the same but for rounding."""

import pytest
import torch

from slime.backends.megatron_utils.fused_adam import FusedAdam
from slime.backends.megatron_utils.moment_storage import MomentStorage
from slime.backends.megatron_utils.update_rules import Adam, Sgd

pytestmark = pytest.mark.gpu


def run(rule, storage, steps=5):
    """The weights after some steps, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1024, 512), (4096,), (300, 7))
    params = [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
    optimizer.arrange(rule, storage)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).cuda()
        optimizer.step()
    return optimizer, [param.detach().cpu() for param in params]


@pytest.mark.parametrize("rule", [Adam(), Sgd(0.9)], ids=repr)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pin", [False, True])
def test_steps_on_the_host_are_those_of_the_gpu(rule, overlap, pin):
    _, expected = run(rule, MomentStorage())
    storage = MomentStorage(host_fraction=1.0, overlap=overlap, pin_params=pin, pin_grads=pin)
    optimizer, found = run(rule, storage)
    assert {m.device.type for state in optimizer.state.values() for m in state.values()} == {"cpu"}
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_moments_on_the_host_take_no_memory_of_the_gpu():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    optimizer, _ = run(Adam(), MomentStorage(host_fraction=1.0))
    weights = sum(p.numel() * 4 for group in optimizer.param_groups for p in group["params"])
    # Weights and their gradients, which allocations round up.
    assert torch.cuda.memory_allocated() - before < 2.1 * weights
