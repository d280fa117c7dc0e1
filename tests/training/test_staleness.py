"""The age of tokens."""

import torch

from slime.training.batch import select
from slime.training.conversion import convert_samples_to_train_data
from slime.training.micro_batches import tensorize
from slime.training.staleness import staleness_metrics
from slime.utils.types import Sample
from tests.megatron_harness import run_ranks


def _batch(*samples):
    return convert_samples_to_train_data(list(samples), [0.0] * len(samples), [0.0] * len(samples))


def _shard(*samples, partition=None):
    batch = _batch(*samples)
    partition = [*range(len(samples))] if partition is None else partition
    whole = {"total_lengths": [len(s.tokens) for s in samples], "raw_reward": batch["raw_reward"]}
    return tensorize(select(batch, partition) | whole | {"partition": partition}, torch.device("cpu"))


def _sample(spans, mask):
    return Sample(
        tokens=[0] * (len(mask) + 1), response_length=len(mask), loss_mask=mask, version_spans=spans
    )


def test_the_age_is_a_mean_over_trained_tokens_and_the_largest_of_them():
    shard = _shard(
        _sample([("3", 2), ("5", 2)], [1, 1, 1, 0]),
        # The oldest is not trained on, and nobody knows who made the others.
        _sample([("1", 1), (None, 1), ("default", 1)], [0, 1, 1]),
    )
    assert staleness_metrics(shard, 5, None) == {
        "rollout/staleness/mean": 4 / 3,
        "rollout/staleness/max": 2.0,
    }


def test_tokens_of_nobody_have_no_age():
    assert staleness_metrics(_shard(_sample([], [1, 1])), 5, None) == {}
    assert staleness_metrics(_shard(_sample([("3", 1)], [0])), 5, None) == {}
    assert staleness_metrics({"loss_masks": []}, 5, None) == {}


def test_where_no_version_is_known_nothing_is_carried_per_token():
    assert "token_versions" not in _batch(_sample([], [1, 1]), _sample([(None, 1), ("default", 1)], [1, 1]))
    some = _batch(_sample([], [1, 1]), _sample([("3", 1)], [1]), _sample([], []))
    assert some["token_versions"] == [[-1, -1], [3], []]


def _of_rank(rank):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=3)
    samples = [_sample([("4", 2)], [1, 1]), _sample([("1", 1)], [1]), _sample([], [1])]
    shard = _shard(*samples, partition=[rank])
    return staleness_metrics(shard, 4, torch.distributed.group.WORLD)


def test_all_ranks_count_whatever_each_of_them_has():
    assert run_ranks(_of_rank, 3) == [{"rollout/staleness/mean": 1.0, "rollout/staleness/max": 3.0}] * 3
