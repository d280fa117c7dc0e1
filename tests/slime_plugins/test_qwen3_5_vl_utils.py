"""Positions of packed sequences with images: those of ``transformers`` for each sequence alone."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from slime_plugins.models.qwen3_5_vl_utils import (
    build_packed_mrope_position_ids,
    get_packed_cp_local_indices,
)

IMAGE, VIDEO, START, END, MERGE = 90, 91, 92, 93, 2
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}


def positions(ids, bounds, images=None, videos=None):
    grids = (None if grid is None else torch.tensor(grid) for grid in (images, videos))
    return build_packed_mrope_position_ids(ids, bounds, *grids, **TOKENS, spatial_merge_size=MERGE)


def random_sequence(draw):
    """Makes tokens, and the grids of the images and videos among them."""
    ids, images, videos = [], [], []
    for _ in range(draw.randrange(5)):
        ids += [draw.randrange(80) for _ in range(draw.randrange(4))]
        height, width = MERGE * draw.randint(1, 4), MERGE * draw.randint(1, 4)
        patches = height * width // MERGE**2
        if draw.random() < 0.5:
            images.append([1, height, width])
            ids += [START, *[IMAGE] * patches, END]
        else:
            videos.append([draw.randint(1, 3), height, width])
            ids += [draw.randrange(80), START, *[VIDEO] * patches, END] * videos[-1][0]
    return [*ids, draw.randrange(80)], images, videos


def by_transformers(ids, images, videos):
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = lambda *args, **kw: Qwen3_5Model.get_vision_position_ids(
        model, *args, **kw
    )
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]])
    grids = (torch.tensor(grid) if grid else None for grid in (images, videos))
    return Qwen3_5Model.get_rope_index(model, torch.tensor([ids]), kinds, *grids)[0][:, 0]


@pytest.mark.parametrize("seed", range(20))
def test_each_packed_sequence_has_the_positions_that_it_has_alone(seed):
    draw = random.Random(seed)
    rows = [random_sequence(draw) for _ in range(draw.randint(1, 4))]
    bounds = [0]
    for ids, _, _ in rows:
        bounds.append(bounds[-1] + len(ids))
    images, videos = ([grid for row in rows for grid in row[kind]] or None for kind in (1, 2))
    packed = torch.tensor([token for ids, _, _ in rows for token in ids])
    found = positions(packed[None], torch.tensor(bounds), images, videos)
    assert found.shape == (3, 1, len(packed)) and found.dtype == torch.int64
    for (begin, end), row in zip(pairwise(bounds), rows, strict=True):
        assert torch.equal(found[:, 0, begin:end], by_transformers(*row))


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        ([START, IMAGE, IMAGE, END], [[1, 2, 2]]),
        ([START, IMAGE], [[1, 4, 2]]),
        ([1, IMAGE], [[1, 2, 2]]),
        ([START, IMAGE], None),
        ([1, 2], [[1, 2, 2]]),
    ],
    ids=["more tokens", "fewer tokens", "no start", "no grid", "no tokens"],
)
def test_tokens_without_their_image_are_an_error(ids, images):
    with pytest.raises(ValueError, match=r"wanted|more images"):
        positions(torch.tensor(ids), [0, len(ids)], images)


def test_an_image_is_not_read_across_two_sequences():
    with pytest.raises(ValueError, match="wanted"):
        positions(torch.tensor([START, IMAGE, IMAGE]), [0, 2, 3], [[1, 2, 4]])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_all_tokens_once_and_as_many_early_as_late_ones(size):
    bounds = [0, 8, 8, 32]
    parts = [get_packed_cp_local_indices(bounds, size, rank, torch.device("cpu")) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(32))
    sums = {int(part[part >= 8].sum()) for part in parts}
    assert len(sums) == 1
    if size == 2:
        assert parts[1].tolist() == [2, 3, 4, 5, *range(14, 20), *range(20, 26)]


def test_a_sequence_that_has_no_equal_chunks_is_an_error():
    with pytest.raises(ValueError, match=r"a sequence of 6 tokens .wanted: a multiple of 4"):
        get_packed_cp_local_indices([0, 6], 2, 0, torch.device("cpu"))
