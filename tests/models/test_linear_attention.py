"""Rows of delta nets: kind by kind or head by head in a checkpoint, by key head in the trainer."""

import torch

from slime.models.linear_attention import ByKeyHead
from tests.run_args import shape_with

# Two key heads of width 2 with two value heads each, of width 1: of all kinds the names of its rows.
SHAPE = shape_with(
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 2, "linear_value_head_dim": 1},
)
QUERY, KEY, VALUE, GATE = [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]
STRENGTH, DECAY = [50, 51, 52, 53], [60, 61, 62, 63]
OF_HEADS = [
    *(10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61),
    *(12, 13, 22, 23, 32, 33, 42, 43, 52, 53, 62, 63),
]


def rows(*parts):
    return torch.tensor([row for part in parts for row in part])[:, None]


def check(rule, tensors):
    assert rule.merge(tensors, SHAPE)[:, 0].tolist() == OF_HEADS
    back = rule.split(rows(OF_HEADS), SHAPE)
    assert [tensor.tolist() for tensor in back] == [tensor.tolist() for tensor in tensors]


def test_rows_that_lie_kind_by_kind_are_put_together_by_head():
    kinds = ((0, 1, 2), (3,), (4,), (5,))
    rule = ByKeyHead(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), kinds, False)
    check(rule, [rows(QUERY, KEY, VALUE), rows(GATE), rows(STRENGTH), rows(DECAY)])


def test_rows_that_lie_head_by_head_stay_so():
    first = [*(10, 11, 20, 21, 30, 31, 40, 41), *(12, 13, 22, 23, 32, 33, 42, 43)]
    rule = ByKeyHead(("in_proj_qkvz", "in_proj_ba"), ((0, 1, 2, 3), (4, 5)), True)
    check(rule, [rows(first), rows([50, 51, 60, 61, 52, 53, 62, 63])])
