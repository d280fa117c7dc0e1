"""Adam is one that the distributed optimizer can load checkpoints with."""

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer

from slime.backends.megatron_utils import fused_adam
from slime.backends.megatron_utils.fused_adam import FusedAdam


@pytest.mark.parametrize("gpu", [True, False])
def test_megatron_gets_our_adam_where_it_would_fall_back(monkeypatch, gpu):
    for module, names in (
        (megatron_optimizer, {"Adam": torch.optim.AdamW, "USING_PYTORCH_OPTIMIZER": True}),
        (
            distrib_optimizer,
            {"Adam": torch.optim.Adam, "HAVE_APEX_OR_TE": False, "USING_TE_OPTIMIZER": False},
        ),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(fused_adam, "has_gpu", lambda: gpu)
    fused_adam.install()
    assert megatron_optimizer.Adam is distrib_optimizer.Adam is FusedAdam
    assert not megatron_optimizer.USING_PYTORCH_OPTIMIZER
    assert distrib_optimizer.HAVE_APEX_OR_TE and distrib_optimizer.USING_TE_OPTIMIZER


def test_a_fused_adam_for_the_gpu_stays(monkeypatch):
    theirs = type("FusedAdam", (torch.optim.Optimizer,), {})
    monkeypatch.setattr(megatron_optimizer, "Adam", theirs)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(fused_adam, "has_gpu", lambda: True)
    fused_adam.install()
    assert megatron_optimizer.Adam is theirs


@pytest.mark.parametrize("adam_w", [True, False])
def test_fused_adam_steps_like_torch(adam_w):
    torch.manual_seed(0)
    start, gradients = torch.randn(5, 3), [torch.randn(5, 3) for _ in range(4)]
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    results = []
    for make in (
        lambda params: FusedAdam(params, adam_w_mode=adam_w, **settings),
        lambda params: (torch.optim.AdamW if adam_w else torch.optim.Adam)(params, **settings),
    ):
        param = torch.nn.Parameter(start.clone())
        optimizer = make([param])
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
        results.append(param.detach())
    assert torch.allclose(*results, atol=1e-6)
    assert not torch.allclose(results[0], start)


def test_fused_adam_keeps_the_step_in_the_group():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match="bias_correction"):
        FusedAdam([param], bias_correction=False)
