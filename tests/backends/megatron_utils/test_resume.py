"""What the optimizer is told of a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.resume import load_optimizer
from slime.config.run import run_config
from tests.run_args import run_args


def _scaler(scale, tracker):
    return {"scale": torch.tensor([scale]), "growth_tracker": tracker, "hysteresis_tracker": 1}


def _loaded(saved):
    """What reaches the optimizer's ``load_state_dict``."""
    told = []
    optimizer = SimpleNamespace(param_groups=[], load_state_dict=told.append)
    load_optimizer(run_config(run_args()).schedule, SimpleNamespace(optimizer=optimizer), saved)
    return told[0]


@pytest.mark.parametrize("scales", [(1024.0, 4096.0), (4096.0, 1024.0), (1024.0, 1024.0)])
def test_parts_whose_loss_scales_differ_go_on_with_the_smallest(scales):
    parts = {i: {"optimizer": {}, "grad_scaler": _scaler(scale, i)} for i, scale in enumerate(scales)}
    first, second = (part["grad_scaler"] for part in _loaded(parts).values())
    assert first is second and float(first["scale"]) == 1024.0
    assert first["growth_tracker"] == scales.index(1024.0)


@pytest.mark.parametrize(
    "saved",
    [
        {"optimizer": {"param_groups": []}, "grad_scaler": _scaler(8.0, 0)},  # one part
        {0: {"optimizer": {}}, 1: {"optimizer": {}}},  # not float16
        {0: {"grad_scaler": {}}, 1: {"grad_scaler": {}}},  # a constant scale
    ],
)
def test_what_has_no_scales_of_parts_stays_as_it_is(saved):
    before = {key: dict(value) for key, value in saved.items()}
    assert _loaded(saved) == before
