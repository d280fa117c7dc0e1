"""Each rank of tensor parallelism keeps its slice of what it got; together they are the weights."""

import pytest
import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.tensor_ranks import Named, joined


def named(fill: float) -> Named:
    return [
        ("matrix", torch.full((3, 2), fill)),
        ("norm", torch.full((4,), fill)),
        ("scale", torch.tensor(fill)),
    ]


def test_rows_come_from_the_rank_that_holds_them() -> None:
    found = dict(joined([named(0.0), named(1.0)]))
    assert found["matrix"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert found["norm"].tolist() == [0, 0, 1, 1] and found["scale"] == 0


def test_one_rank_keeps_what_it_got_without_a_copy() -> None:
    given = named(1.0)
    assert joined([given]) is given


def test_fewer_rows_than_ranks_are_whole() -> None:
    weight = torch.arange(2.0)
    ((_, found),) = joined([[("w", weight)]] * 3)
    assert torch.equal(found, weight)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (named(1.0)[:2], r"TP rank 1: 2 tensors \(wanted: 3, as on rank 0\)"),
        ([("x", torch.zeros(3, 2)), *named(1.0)[1:]], r"TP rank 1: tensor \('x', .*wanted: \('matrix', "),
        ([("matrix", torch.zeros(2, 3)), *named(1.0)[1:]], r"TP rank 1: tensor .*2, 3.* \(wanted: .*3, 2"),
        ([("matrix", torch.zeros(3, 2).half()), *named(1.0)[1:]], r"TP rank 1: tensor .*float16"),
    ],
)
def test_ranks_that_got_different_weights_are_refused(other: Named, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        joined([named(0.0), other])
