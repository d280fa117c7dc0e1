"""An engine that holds something else than it was sent is found, and the weight is named."""

from unittest.mock import MagicMock

import pytest
import torch

from slime.utils.tensor_bucket import tensor_digest
from slime.weight_sync.proof import SentTensors, require_ranks_hold

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def engine(url, weights, dtypes=True):
    rank = {"checksums": {name: tensor_digest(tensor) for name, tensor in weights.items()}}
    if dtypes:
        rank["dtypes"] = {name: str(t.dtype).removeprefix("torch.") for name, t in weights.items()}
    client = MagicMock()
    client.endpoint.url = url
    client.weights_checker.return_value = {"ranks": [rank]}
    return client


@pytest.fixture
def sent():
    tensors = SentTensors()
    assert [*tensors.noted([[pair] for pair in WEIGHTS.items()])] == [[pair] for pair in WEIGHTS.items()]
    return tensors


def test_what_was_sent_before_is_forgotten(sent):
    assert [*sent.noted([[("c", torch.ones(1))]])] and [*sent.digests] == ["c"]


def changed(name):
    return WEIGHTS | {name: WEIGHTS[name] + 1}


def test_engines_that_hold_what_was_sent_pass(sent):
    sent.require_held([engine("one", WEIGHTS), engine("two", WEIGHTS)], WEIGHTS)


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (
            [engine("one", WEIGHTS), engine("two", changed("b"))],
            "engine two: weight 'b': checksum .* as sent",
        ),
        ([engine("one", WEIGHTS | {"c": torch.ones(1)})], "engine one: weight 'c': no update brought it"),
        (
            [engine("one", WEIGHTS, dtypes=False), engine("two", changed("a"), dtypes=False)],
            "engine two: weight 'a': checksum .* as on one",
        ),
        (
            [engine("one", WEIGHTS, dtypes=False), engine("two", {}, dtypes=False)],
            "engine two: weight 'a': checksum None",
        ),
    ],
)
def test_another_weight_is_named(sent, engines, said):
    with pytest.raises(RuntimeError, match=said):
        sent.require_held(engines, WEIGHTS)


def test_a_weight_in_another_format_is_not_compared_with_what_was_sent(sent):
    sent.require_held([engine("one", {**WEIGHTS, "a": WEIGHTS["a"].bfloat16()})], WEIGHTS)


def test_servers_that_join_tensors_are_compared_with_each_other_alone(sent):
    joined = {"ab": torch.ones(9)}
    sent.require_held([engine("one", joined, dtypes=False), engine("two", joined, dtypes=False)], WEIGHTS)


def ranks_of(url, *held, dtypes=True):
    """An engine whose ranks hold these tensors, and which tells them when it is asked for each rank's."""
    client = engine(url, {}, dtypes)
    ranks = [engine(url, weights, dtypes).weights_checker.return_value["ranks"][0] for weights in held]
    client.request.return_value = {"ranks": ranks}
    if not dtypes:
        client.weights_checker.return_value = {"ranks": ranks}
    return client


def digests(*held):
    return [
        {name: (str(t.dtype).removeprefix("torch."), tensor_digest(t)) for name, t in weights.items()}
        for weights in held
    ]


OTHER = {"a": WEIGHTS["a"] + 1, "b": WEIGHTS["b"]}


@pytest.mark.parametrize("dtypes", [True, False])
def test_each_rank_is_held_against_what_was_sent_to_it(dtypes):
    engines = [ranks_of(url, WEIGHTS, OTHER, dtypes=dtypes) for url in ("one", "two")]
    require_ranks_hold(engines, [digests(WEIGHTS, OTHER)] * 2)
    require_ranks_hold([ranks_of("one", WEIGHTS | {"a": WEIGHTS["a"].half()})], [digests(WEIGHTS)])


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([ranks_of("one", WEIGHTS, WEIGHTS)], "engine one, rank 1: tensor 'a': checksum .* as sent"),
        ([ranks_of("one", WEIGHTS, {"b": OTHER["b"]})], "rank 1: tensor 'a': was sent, and is not there"),
        ([ranks_of("one", WEIGHTS, OTHER | {"c": OTHER["a"]})], "rank 1: tensor 'c': no update brought it"),
        ([ranks_of("one", WEIGHTS, {"b": OTHER["b"]}, dtypes=False)], "rank 1: tensor 'a': was sent, and is"),
        (
            [ranks_of(url, WEIGHTS, held, dtypes=False) for url, held in (("one", OTHER), ("two", WEIGHTS))],
            "engine two: weight 'a': checksum .* as on one",
        ),
    ],
)
def test_another_tensor_of_a_rank_is_named(engines, said):
    with pytest.raises(RuntimeError, match=said):
        require_ranks_hold(engines, [digests(WEIGHTS, OTHER)] * len(engines))
