"""Packing of segments for attention."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers import PackedAttention, RMSNorm, apply_rope, attention_with_sinks
from slime.models.rope import Rope
from slime.training.context_parallel import Piece, RowSplit
from slime.training.packed_layout import PackedLayout, similar_lengths

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
    assert _layout([3, 0, 2]).positions.tolist() == [[0, 1, 2, 0, 1]]


def test_equal_segments_need_no_reordering():
    assert _layout([4, 4, 4]).order is None
    assert _layout([4, 3]).order is not None


def test_groups_start_with_the_longest():
    groups = similar_lengths([Piece(0, 0, 3), Piece(3, 3, 13), Piece(13, 13, 22)])
    assert groups == [[(3, 3, 13), (13, 13, 22)], [(0, 0, 3)]]


def _reference(query, key, value, lengths):
    """Causal attention of each segment, in float64, one head at a time."""
    out, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length].double() for x in (query, key, value))
        groups = q.size(1) // k.size(1)
        heads = []
        for head in range(q.size(1)):
            scores = q[:, head] @ k[:, head // groups].T / q.size(-1) ** 0.5
            hidden = torch.ones(length, length).triu(1).bool()
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head // groups])
        out.append(torch.stack(heads, 1))
        start += length
    return torch.cat(out)


def _boundary_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch's kernel for GPUs computes: the last query of a piece sees its last key."""
    assert window_size == (-1, 0) and max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    out = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        seen = torch.ones(b - a, d - c).tril(d - c - (b - a)).bool()
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        piece = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
        out.append(piece.transpose(0, 1))
    return torch.cat(out)


def _kernel_of_equal_heads(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """The kernel of torch 2.11 takes no fewer heads of keys."""
    assert query.size(1) == key.size(1) == value.size(1)
    return _boundary_kernel(
        *(query, key, value, cu_q, cu_k, max_q, max_k), scale=scale, window_size=window_size
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("kernel", [None, _boundary_kernel, _kernel_of_equal_heads])
def test_attention_of_each_ranks_queries_is_that_of_the_whole_row(size, contiguous, kernel, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = PackedAttention(config, 1, None, "self", attention_dropout=0.0, rope=Rope(1e4))
    lengths = [12, 24, 12, 36]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(84, heads, 8, generator=generator) for heads in (4, 2, 2))
    cos, sin = _layout(lengths).rope(Rope(1e4), 8, torch.float32)
    expected = _reference(apply_rope(query, cos, sin), apply_rope(key, cos, sin), value, lengths)
    splits = [RowSplit(tuple(lengths), size, rank, contiguous) for rank in range(size)]
    order = torch.cat([split.rows for split in splits])
    # In place of the other ranks.
    everywhere = apply_rope(key, cos, sin)[order], value[order]
    monkeypatch.setattr(attention, "_gather", lambda key, value: everywhere)
    for split in splits:
        local = (split.take(x) for x in (query, key, value))
        found = attention._packed(*local, PackedLayout.of_split(split, CPU), kernel is not None)
        torch.testing.assert_close(found.double(), split.take(expected), rtol=1e-5, atol=1e-6)


def test_rope_turns_pairs_of_halves_as_complex_numbers_and_gradients_back():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 6, generator=generator, dtype=torch.double, requires_grad=True)
    angles = torch.randn(5, 1, 3, generator=generator, dtype=torch.double)
    both = torch.cat([angles, angles], -1)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(apply_rope(x, both.cos(), both.sin()), expected)
    assert torch.autograd.gradcheck(apply_rope, (x, both.cos(), both.sin()))


def _config(**values):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**{**sizes, **values})


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("epsilon", [{}, {"eps": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_divides_by_the_root_of_the_mean_square(centred, epsilon, dtype):
    config = _config(layernorm_zero_centered_gamma=centred, params_dtype=dtype)
    norm = RMSNorm(config, 6, **epsilon)
    assert norm.weight.dtype == dtype and not norm.weight.sequence_parallel
    assert norm.weight.tolist() == [0.0 if centred else 1.0] * 6
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, generator=generator))
    x = (torch.randn(3, 6, generator=generator) * 0.01).to(dtype)
    squares = x.double().square().mean(-1, keepdim=True) + epsilon.get("eps", 1e-5)
    wanted = x.double() / squares.sqrt() * (norm.weight.double() + (1 if centred else 0))
    found = norm(x)
    assert found.dtype == dtype
    close = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.double(), wanted, **close)


@pytest.mark.parametrize("masked", [False, True])
def test_a_sink_takes_its_share_of_each_heads_softmax(masked):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 5, generator=generator)
    key, value = torch.randn(2, 2, 2, 3, 5, generator=generator)
    sinks = torch.tensor([0.0, 1.0, -2.0, 30.0])
    seen = torch.ones(2, 1, 3, 3).tril().bool()
    if masked:
        seen[1, 0, 2, 0] = False
    found = attention_with_sinks(query, key, value, sinks, seen if masked else None, 0.7)
    for segment in range(2):
        for head in range(4):
            k, v = (x[segment, head // 2].double() for x in (key, value))
            scores = (query[segment, head].double() @ k.T * 0.7).exp() * seen[segment, 0]
            weights = scores / (scores.sum(-1, keepdim=True) + sinks[head].double().exp())
            torch.testing.assert_close(found[segment, head].double(), weights @ v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("of_config", "given"), [(0.1, None), (0.0, 0.25), (0.1, 0.25)])
def test_attention_drops_nothing(of_config, given):
    config = _config(attention_dropout=of_config)
    with pytest.raises(ValueError, match=f"^--attention-dropout {given or of_config}: wanted 0.0"):
        PackedAttention(config, 1, None, "self", attention_dropout=given, rope=Rope(1e4))


def test_a_layer_has_its_window_its_rope_and_its_scale():
    every, local = Rope(1e4, percent=0.5), Rope(1e2)
    build = lambda layer, **more: PackedAttention(_config(), layer, None, "self", rope=every, **more)
    plain = build(1)
    assert (plain.scale, plain._window, plain._rope, plain._rotated_width) == (8**-0.5, None, every, 4)
    assert plain.softmax_offset is None and plain._rotated_from == 0 and plain._cp_group is None
    scaled = build(1, softmax_scale=0.25, score_factor=2.0, rotated_from=3, rotated_width=2)
    assert (scaled.scale, scaled._rotated_from, scaled._rotated_width) == (0.5, 3, 2)
    windows = [build(layer, windows=(None, 5), local_rope=local) for layer in (1, 2)]
    assert [(one._window, one._rope) for one in windows] == [(None, every), (5, local)]
    assert build(2, windows=(None, 5))._rope is every
