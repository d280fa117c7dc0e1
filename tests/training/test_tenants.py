"""Data of tenants: how they are spread over ranks, and losses of tokens."""

import math

import pytest
import torch

from slime.training.tenants import CLIPS, shard_of, token_losses
from tests.run_args import config_with

ROWS = [{"tokens": [1, 2, 3], "advantages": [1.0, 2.0], "log_probs": [-1.0, -2.0]} for _ in range(3)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("vpp", "stages", "least"), [(1, 2, 4), (2, 2, 8)])
def test_each_rank_has_a_datum_of_which_those_added_train_nothing(count, vpp, stages, least):
    flags = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    layout = {"dp_size": 4, "cp_size": 1, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": stages}
    seen = {}
    for rank in range(4):
        shard = shard_of(config_with(**flags), layout | {"dp_rank": rank}, ROWS[:count])
        assert shard["tokens"] and shard["num_microbatches"] == [least // 4]
        seen |= dict(zip(shard["sample_indices"], shard["advantages"], strict=True))
    assert seen == {number: [1.0, 2.0] if number < count else [0.0, 0.0] for number in range(least)}


@pytest.mark.parametrize("kind", ["cross_entropy", "importance_sampling", "ppo"])
def test_a_token_without_an_advantage_trains_nothing_whatever_its_log_prob(kind):
    new = torch.tensor([math.inf, -1.0], requires_grad=True)
    old, advantages = torch.tensor([0.0, -1.0]), torch.tensor([0.0, 2.0])
    losses = token_losses(kind, CLIPS, new, old, advantages)
    assert losses.tolist() == [0.0, 2.0 if kind == "cross_entropy" else -2.0]
