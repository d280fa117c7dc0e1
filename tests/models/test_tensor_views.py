"""What is a view of a buffer is found by the indices of its elements, and what is none is refused."""

import pytest
import torch

from slime.models.checkpoint.tensor_views import view_at

FLAT = torch.arange(100.0, 124.0)


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t,
        lambda t: t.view(4, 6),
        lambda t: t.view(4, 6).T,
        lambda t: t.view(4, 6)[1:3, 2:4],
        lambda t: t.view(2, 3, 4).transpose(0, 2)[1:],
        lambda t: t.view(4, 6)[:, 3:4],
        lambda t: t.view(4, 6)[2:3],
        lambda t: t[7:8],
    ],
)
def test_a_view_is_found_and_shares_its_memory(cut):
    flat = FLAT.clone()
    found = view_at(flat, cut(torch.arange(24)), "a")
    assert torch.equal(found, cut(FLAT))
    found.zero_()
    assert int((flat == 0).sum()) == found.numel()


def test_what_is_no_view_is_refused():
    for indices in ([0, 1, 3], [2, 1, 2], [[0, 1], [2, 4]]):
        with pytest.raises(ValueError, match=r"^a: transformers keeps it in a form that cannot be written"):
            view_at(FLAT, torch.tensor(indices), "a")
