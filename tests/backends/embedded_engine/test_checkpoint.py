"""Weights that an engine starts with."""

from types import SimpleNamespace

import torch

from slime.backends.embedded_engine.checkpoint import load_random


def test_random_weights_follow_from_their_seed_and_norms_are_one():
    def load(seed: int) -> dict[str, torch.Tensor]:
        named = {
            "a.weight": torch.zeros(200, 300),
            "b.weight": torch.zeros(300),
            "norm.weight": torch.zeros(5),
        }
        load_random(SimpleNamespace(named=named), seed)
        return named

    first, same, other = load(3), load(3), load(4)
    assert all(torch.equal(first[name], same[name]) for name in first)
    for name in ("a.weight", "b.weight"):
        assert not torch.equal(first[name], other[name])
        assert 0.018 < float(first[name].std()) < 0.022
    assert torch.equal(first["norm.weight"], torch.ones(5))
