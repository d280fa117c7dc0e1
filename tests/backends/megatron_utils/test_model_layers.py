"""Packing of segments for attention."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.packed_layout import PackedLayout, similar_lengths
from slime.training.context_parallel import Piece

CPU = torch.device("cpu")


def _layout(lengths):
    return PackedLayout.from_boundaries(torch.tensor([0, *lengths]).cumsum(0).tolist(), CPU)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
def test_grouping_and_ungrouping_gives_every_row_back(lengths):
    layout = _layout(lengths)
    rows = torch.arange(sum(lengths))
    grouped = torch.cat([rows.index_select(0, group.rows) for group in layout.groups])
    back = grouped if layout.order is None else grouped.index_select(0, layout.order)
    assert torch.equal(back, rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_each_slot_holds_its_segment_from_the_left(lengths):
    layout = _layout(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    found = {}
    for group in layout.groups:
        for row in group.rows.view(group.segments, group.length).tolist():
            found[row[0]] = row
    assert sorted(found) == starts
    for start, length in zip(starts, lengths, strict=True):
        assert found[start][:length] == list(range(start, start + length))
        assert length >= 0.75 * len(found[start])


def test_positions_restart_with_each_segment():
    assert _layout([3, 0, 2]).positions.tolist() == [0, 1, 2, 0, 1]


def test_equal_segments_need_no_reordering():
    assert _layout([4, 4, 4]).order is None
    assert _layout([4, 3]).order is not None


def test_groups_start_with_the_longest():
    groups = similar_lengths([Piece(0, 0, 3), Piece(3, 3, 13), Piece(13, 13, 22)])
    assert groups == [[(3, 3, 13), (13, 13, 22)], [(0, 0, 3)]]
