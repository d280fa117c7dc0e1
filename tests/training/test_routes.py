"""Routes of samples: what is refused, and where they are in the rows of a micro-batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.training.batch import BatchError
from slime.training.context_parallel import RowSplit
from slime.training.conversion import samples_to_train_data
from slime.training.dumps import to_host
from slime.training.micro_batches import DataIterator, packed_micro_batch
from slime.training.routes import NO_ROUTE, packed_routes
from slime.utils.types import Sample
from tests.training.test_conversion import train_config

ARGS = {
    "use_rollout_routing_replay": True,
    "replays_nucleus": False,
    "num_layers": 2,
    "moe_router_topk": 1,
    "num_experts": 1000,
}


def sample(length=6, rows=5, response=3, first=0, **fields):
    """Token i is routed to the experts first + 2i and first + 2i + 1 of the two layers."""
    routes = (first + np.arange(2 * rows, dtype=np.int32)).reshape(rows, 2, 1)
    values = dict(tokens=[*range(length)], response_length=response, reward=1.0, index=first)
    return Sample(**(values | {"rollout_routed_experts": routes} | fields))


def converted(*samples, **changes):
    config = train_config(n_samples_per_prompt=1, rewards_normalization=False, **{**ARGS, **changes})
    return samples_to_train_data(config, list(samples))


def test_a_recorded_sample_is_converted_as_the_one_that_was_generated():
    fresh = sample()
    recorded = Sample.from_dict(fresh.to_dict())
    assert isinstance(recorded.rollout_routed_experts, torch.Tensor)
    first, second = converted(fresh, recorded)["rollout_routed_experts"]
    assert first.dtype == np.int16 and np.array_equal(first, second)
    assert np.array_equal(first, fresh.rollout_routed_experts)


def test_a_dump_of_what_was_trained_can_be_read_without_running_anything(tmp_path):
    batch = converted(sample())
    torch.save(to_host(batch["rollout_routed_experts"]), tmp_path / "dump")
    (routes,) = torch.load(tmp_path / "dump", weights_only=True)
    assert torch.equal(routes, torch.from_numpy(batch["rollout_routed_experts"][0]))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rollout_routed_experts": None}, "have no rollout_routed_experts, but others in the batch do"),
        ({"rows": 4}, "routes of 4 tokens, wanted 5 to 5 for a sample of 6"),
        ({"rows": 6}, "routes of 6 tokens, wanted 5 to 5 for a sample of 6"),
        (
            {"rollout_routed_experts": np.zeros((5, 3, 1))},
            r"routes of shape \[5, 3, 1\], wanted \[tokens - 1, 2, 1\]",
        ),
        ({"first": 995}, "experts 995 to 1004, wanted 0 to 999"),
        ({"first": -1}, "experts -1 to 8, wanted 0 to 999"),
    ],
)
def test_routes_that_do_not_fit_are_refused(fields, complaint):
    with pytest.raises(BatchError, match=complaint):
        converted(sample(index=1), sample(**fields))


def test_a_batch_without_routes_says_what_requests_lack():
    with pytest.raises(BatchError, match=r"no sample has rollout_routed_experts \(wanted: return_routed"):
        converted(sample(rollout_routed_experts=None))
    assert "rollout_routed_experts" not in converted(
        sample(rollout_routed_experts=None), use_rollout_routing_replay=False
    )


def test_tokens_after_the_last_that_is_trained_on_need_no_route():
    """Such as what a tool said last; nor does a sample that is not trained on at all."""
    tool_last = sample(length=8, rows=4, response=5, loss_mask=[1, 1, 0, 0, 0])
    removed = sample(index=1, rollout_routed_experts=None, remove_sample=True)
    found = converted(tool_last, removed)["rollout_routed_experts"]
    assert [routes.shape for routes in found] == [(4, 2, 1), (0, 2, 1)]
    with pytest.raises(BatchError, match="routes of 3 tokens, wanted 4 to 7"):
        converted(sample(length=8, rows=3, response=5, loss_mask=[1, 1, 0, 0, 0]))


@pytest.mark.parametrize(("cp", "contiguous"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_routes_lie_where_their_tokens_are(cp, contiguous):
    """Packed with tokens whose values say which routes they have."""
    samples = [sample(length, length - 1, 2, first=100 * i) for i, length in enumerate([6, 9, 3])]
    tokens = [torch.arange(len(s.tokens)) + 1000 * (i + 1) for i, s in enumerate(samples)]
    shard = {
        "tokens": tokens,
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [2] * 3,
        "loss_masks": [torch.ones(2, dtype=torch.int)] * 3,
    }
    seen = 0
    for rank in range(cp):
        context = SimpleNamespace(cp_size=cp, cp_rank=rank, contiguous_cp=contiguous)
        batch = packed_micro_batch(DataIterator(shard, [[0, 1, 2]]), (), 8, context)
        split = RowSplit.of(batch["segment_lengths"], context)
        routes = packed_routes([s.rollout_routed_experts for s in samples], split)
        assert len(routes) == batch["tokens"].shape[1]
        for token, rows in zip(batch["tokens"][0].tolist(), routes, strict=True):
            number, position = divmod(token, 1000)
            known = number and position < len(samples[number - 1].tokens) - 1
            first = 100 * (number - 1) + 2 * position
            assert rows.flatten().tolist() == ([first, first + 1] if known else [NO_ROUTE] * 2)
            seen += bool(known)
    assert seen == sum(len(s.tokens) - 1 for s in samples)
