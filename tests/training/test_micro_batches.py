import pytest
import torch

from slime.training.metrics import rollout_metrics
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.training.parallel import ParallelContext


def _shards(raw_rewards):
    """One sample for each of two ranks."""
    return [
        {
            **{"tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[1, 1]], "rewards": [0.5]},
            **{"rollout_mask_sums": [2], "total_lengths": [3, 3], "sample_indices": [rank]},
            **{"partition": [rank], "raw_reward": raw_rewards},
        }
        for rank in range(2)
    ]


@pytest.mark.parametrize("raw_rewards", [[1.0, {"score": 2.0}], [1.0, None], [1, 0.5]])
def test_all_ranks_have_the_same_metrics_whatever_the_raw_rewards(raw_rewards):
    first, last = (
        rollout_metrics(tensorize(shard, torch.device("cpu")), num_rollouts=2, group=None)
        for shard in _shards(raw_rewards)
    )
    assert first.keys() == last.keys() and "rollout/raw_reward" not in first


@pytest.mark.parametrize(("size", "contiguous"), [(1, False), (2, False), (2, True)])
def test_padding_is_marked_wherever_the_row_is_split(size, contiguous):
    """Tokens count from 1; padding is token 0."""
    lengths = [5, 8, 3]
    shard = {
        "tokens": [torch.arange(1, length + 1) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": [2] * 3,
        "loss_masks": [torch.ones(2, dtype=torch.int)] * 3,
    }
    real = 0
    for rank in range(size):
        context = ParallelContext(cp_rank=rank, cp_size=size, contiguous_cp=contiguous)
        batch = packed_micro_batch(DataIterator(shard, [[0, 1, 2]]), (), 8, context)
        assert torch.equal(batch["inputs"].padding, batch["tokens"] == 0)
        real += int((~batch["inputs"].padding).sum())
    assert real == sum(lengths)
