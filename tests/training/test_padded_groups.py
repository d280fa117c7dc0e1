"""Groups of similar size, and where their sequences lie."""

import torch

from slime.training.packed_layout import note_places, padded_rows, similar


def test_groups_start_with_the_largest_and_keep_the_order_of_equals():
    assert similar([(3,), (10,), (9,), (3,), (7,)]) == [[1, 2], [4], [0, 3]]
    assert similar([]) == []


def test_every_dimension_has_to_be_similar():
    assert similar([(8, 8), (8, 6), (8, 5), (6, 6)]) == [[0, 1], [2, 3]]
    assert similar([(8, 6), (7, 8), (7, 3)]) == [[0, 1], [2]], "the later one may be larger in the second"


def test_each_real_row_finds_its_place_in_the_padded_batches():
    lengths, starts = [4, 1, 3, 2], [0, 4, 5, 8]
    order, batches, offset = torch.full((10,), -1), [], 0
    for members in ([0, 2], [3, 1]):
        rows, real = padded_rows([starts[i] for i in members], [lengths[i] for i in members])
        note_places(order, rows, real, offset)
        batches.append(rows.where(real, 0).flatten())
        offset += rows.numel()
    assert torch.equal(torch.cat(batches)[order], torch.arange(10))
