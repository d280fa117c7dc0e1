"""Which keys an indexer chooses: those of the highest scores, counted by hand, within each segment."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from slime.models.rope import Rope
from slime.training.context_parallel import Piece
from slime.training.packed_layout import PackedLayout
from slime_plugins.models import lightning_indexer
from slime_plugins.models.glm5 import EdgeLayer
from slime_plugins.models.lightning_indexer import IndexerSizes, LightningIndexer
from tests.families import tiny_config

# Below, at and above the number of chosen keys.
LENGTHS = [3, 4, 17, 9, 1]
SIZES = IndexerSizes(heads=6, width=8, topk=4, kinds=(1, 0, 1), rope=Rope(base=100.0), rotated=4)


@pytest.fixture
def indexer():
    config = SimpleNamespace(
        **{"q_lora_rank": 10, "hidden_size": 12, "params_dtype": torch.float32, "sequence_parallel": False},
        **{"perform_initialization": True, "init_method": torch.nn.init.normal_},
    )
    torch.manual_seed(2)
    made = LightningIndexer(config, SIZES, SimpleNamespace(tp=None, cp=None))
    torch.nn.init.normal_(made.k_norm.weight)
    torch.nn.init.normal_(made.k_norm.bias)
    return made


def inputs(seed=0):
    """Hidden states and latent vectors of queries."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(LENGTHS)
    return torch.randn(rows, 1, 12, generator=generator), torch.randn(rows, 1, 10, generator=generator)


def boundaries():
    return [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


def rotated(x, position, interleaved):
    """The first 4 of 8 features, pair by pair."""
    out = x.clone()
    for pair in range(2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
        angle = torch.tensor(position * 100.0 ** (-pair / 2), dtype=torch.float64)
        out[first] = x[first] * angle.cos() - x[second] * angle.sin()
        out[second] = x[second] * angle.cos() + x[first] * angle.sin()
    return out


def chosen_by_hand(indexer, hidden, latent, interleaved):
    """For each row of a segment the set of keys that it reads, one pair of tokens after the other."""
    weights = {name: tensor.double() for name, tensor in indexer.state_dict().items()}
    keys, found = [], []
    for position, (x, r) in enumerate(zip(hidden.double()[:, 0], latent.double()[:, 0], strict=True)):
        key = weights["linear_wk.weight"] @ x
        key = (key - key.mean()) / (key.var(unbiased=False) + 1e-6).sqrt()
        key = key * weights["k_norm.weight"] + weights["k_norm.bias"]
        keys.append(rotated(key, position, interleaved))
        queries = (weights["linear_wq_b.weight"] @ r).view(6, 8)
        share = weights["linear_weights_proj.weight"] @ x
        scores = []
        for other in keys:
            products = [float(rotated(q, position, interleaved) @ other) for q in queries]
            scores.append(sum(float(w) * max(p, 0.0) for w, p in zip(share, products, strict=True)))
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        found.append({*order[:4]})
    return found


def read_keys(choice, layout):
    """Returns what a choice reads: for each row the positions that it reads, by the masks of the groups."""
    found = {}
    for number, group in enumerate(layout.groups):
        mask = choice.mask(number, layout)
        seen = group.seen(0, group.length)[:, None] if mask is None else mask
        seen = seen.expand(group.segments, 1, -1, -1)
        for slot, row in enumerate(group.rows.tolist()):
            segment, place = divmod(slot, group.length)
            places = seen[segment, 0, place].nonzero().flatten().tolist()
            found.setdefault(row, {*places})
    return [found[row] for row in range(layout.num_rows)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("most_scores", [2**26, 200])
def test_queries_read_the_keys_of_the_highest_scores(indexer, monkeypatch, interleaved, most_scores):
    monkeypatch.setattr(lightning_indexer, "_MAX_SCORES", most_scores)
    indexer._sizes = replace(SIZES, rope=replace(SIZES.rope, interleaved=interleaved))
    hidden, latent = inputs()
    layout = PackedLayout.from_boundaries(boundaries(), hidden.device)
    found = read_keys(indexer(hidden, latent, layout), layout)
    expected = []
    for begin, length in zip(boundaries(), LENGTHS, strict=False):
        rows = slice(begin, begin + length)
        expected += chosen_by_hand(indexer, hidden[rows], latent[rows], interleaved)
    assert found == expected


def test_the_norm_of_keys_has_the_epsilon_of_transformers(indexer):
    assert indexer.k_norm.eps == DeepseekV32Indexer(tiny_config("deepseek_v32"), 0).k_norm.eps


def test_a_batch_of_short_segments_reads_everything(indexer):
    hidden, latent = inputs()
    layout = PackedLayout([Piece(0, 0, 4), Piece(4, 4, 6)], hidden.device)
    assert indexer(hidden[:6], latent[:6], layout).is_everything


def test_what_is_chosen_has_no_gradient(indexer):
    hidden, latent = inputs()
    layout = PackedLayout.from_boundaries(boundaries(), hidden.device)
    choice = indexer(hidden.requires_grad_(), latent, layout)
    assert not choice.is_everything
    assert not any(
        mask.requires_grad for n in range(len(layout.groups)) if (mask := choice.mask(n, layout)) is not None
    )


def test_layers_without_an_indexer_know_whose_choice_is_theirs():
    sizes = replace(SIZES, kinds=(1, 1, 0, 0, 1))
    assert [sizes.source(layer) for layer in range(5)] == [0, 1, 1, 1, 4]
    assert [layer for layer in range(5) if sizes.is_shared(layer)] == [1, 2]


def test_a_choice_travels_row_by_row(indexer):
    hidden, latent = inputs()
    layout = PackedLayout.from_boundaries(boundaries(), hidden.device)
    choice = indexer(hidden, latent, layout)
    rows = choice.rows(layout)
    assert rows.shape == (sum(LENGTHS), 4) and rows.dtype == torch.int32
    assert read_keys(lightning_indexer.Choice.of_rows(rows, layout), layout) == read_keys(choice, layout)


def test_a_choice_travels_beside_slots_that_pad(indexer):
    """They have that of the first row, of a longer segment. One segment has a key more than are chosen."""
    lengths = [30, 9, 7, 5]
    hidden, latent = torch.randn(51, 1, 12), torch.randn(51, 1, 10)
    starts = [0, 30, 39, 46, 51]
    layout = PackedLayout.from_boundaries(starts, hidden.device)
    assert any(group.segments * group.length > len(set(group.rows.tolist())) for group in layout.groups)
    rows = torch.stack([torch.arange(n - 1, n - 5, -1) for n in lengths]).int()
    rows = rows.repeat_interleave(torch.tensor(lengths), dim=0)
    choice, every = lightning_indexer.Choice.of_rows(rows, layout), indexer(hidden, latent, layout)
    assert [chosen is None for chosen in choice.chosen] == [chosen is None for chosen in every.chosen]
    for row, places in enumerate(read_keys(choice, layout)):
        segment = next(i for i in reversed(range(4)) if starts[i] <= row)
        place, length = row - starts[segment], lengths[segment]
        assert places >= {other for other in range(length - 4, length) if other <= place}
        assert not any(other > place or other < length - 4 for other in places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_travels_with_hidden_states_bit_by_bit(indexer, dtype):
    hidden, latent = inputs()
    layout = PackedLayout.from_boundaries(boundaries(), hidden.device)
    choice = indexer(hidden, latent, layout)
    stage = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False, hidden_size=12))
    wide = EdgeLayer._widened(stage, hidden.to(dtype), choice, layout)
    assert wide.shape == (sum(LENGTHS), 1, 12 + 4 * 4 // dtype.itemsize)
    narrow, found = EdgeLayer._narrowed(stage, wide, layout)
    assert torch.equal(narrow, hidden.to(dtype))
    assert read_keys(found, layout) == read_keys(choice, layout)
