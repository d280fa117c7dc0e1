"""Indexers choose the first of equal scores, in rows of any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.chosen_keys import choose_first_of_equals, chosen_keys


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(0, 20), st.integers(1, 8), st.booleans(), st.integers(0, 10**6))
def test_of_equal_scores_the_first_are_chosen_however_long_the_row_is(seen, unseen, count, down, seed):
    """What comes after a token has the score -inf, as in training."""
    draw = torch.Generator().manual_seed(seed)
    row = torch.randint(-3, 3, (3, seen), generator=draw).clamp(min=0).float() * (-1 if down else 1)
    scores = torch.cat([row, torch.full((3, unseen), -torch.inf)], dim=1)
    count = min(count, seen + unseen)
    found = chosen_keys(scores, count)
    for own, places in zip(row.tolist(), found.tolist(), strict=True):
        wanted = sorted(range(seen), key=lambda place: (-own[place], place))[:count]
        assert {place for place in places if place < seen} == {*wanted}
        assert len({*places}) == count


def test_without_equal_scores_it_is_topk():
    scores = torch.randn(4, 5, 33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(chosen_keys(scores, 6), scores.topk(6).indices)


def test_no_other_call_than_that_of_the_choice_is_touched():
    class OwnIndexer(torch.nn.Module):
        def forward(self, scores, **options):
            best = scores.topk(2, **options)
            assert torch.equal(best.values, torch.ones(2))
            return best.indices, scores.sum()

    model = torch.nn.Sequential(OwnIndexer())
    choose_first_of_equals(model)
    places, total = model[0](torch.tensor([0.0, 1, 1, 1]), dim=-1)
    assert ({*places.tolist()}, total) == ({1, 2}, 3)
    with pytest.raises(ValueError, match=r"an indexer calls topk with .*'largest': False"):
        model[0](torch.zeros(4), largest=False)
