"""A rank that takes longer than the others is found by what it does without waiting for them."""

from slime.observability.slow_ranks import NO_RANK, slow_rank, spans_alone
from slime.observability.spans import Span


def ranks(*seconds: float, name: str = "log_probs") -> list[list[Span]]:
    return [[Span("train", 0.0, 9.0), Span(name, 1.0, 1.0 + own)] for own in seconds]


def test_the_rank_that_is_slower_by_far_is_named() -> None:
    assert slow_rank(ranks(1.0, 2.5, 1.0)) == 1
    assert slow_rank(ranks(1.0, 2.0, 4.0, 1.0)) == 2  # by the most
    assert slow_rank(ranks(1.0, 1.4)) == NO_RANK
    assert slow_rank(ranks(0.001, 0.01)) == NO_RANK  # milliseconds


def test_nothing_is_compared_where_ranks_wait_for_one_another_or_there_is_one() -> None:
    assert slow_rank(ranks(1.0, 5.0, name="actor_train")) is None
    assert slow_rank(ranks(1.0)) is None and slow_rank([]) is None and slow_rank([[], []]) is None


def test_passes_are_compared_each_for_itself_and_with_all_their_parts() -> None:
    two = [[*own, *own] for own in ranks(0.03, 0.048)]
    assert slow_rank(ranks(0.03, 0.048)) == NO_RANK and slow_rank(two) == 1
    mixed = [
        first + second for first, second in zip(ranks(3.0, 1.0), ranks(1.0, 3.5, name="values"), strict=True)
    ]
    assert slow_rank(mixed) == 1
    assert [span.name for span in spans_alone(mixed[0])] == ["log_probs", "values"]
