"""What user code hands over is looked at where it comes in."""

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.checks import check_samples
from slime.utils.notes import take_notes
from slime.utils.types import Sample


def sample(index, log_probs=(-0.1, -0.2)):
    return Sample(index=index, group_index=0, rollout_log_probs=list(log_probs))


def test_samples_of_their_own_with_finite_log_probs_pass():
    check_samples("a.b", [sample(0), sample(1), Sample(index=2), sample(3, [])])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([sample(0), "text"], "a.b returned 'text' among its samples, expected a Sample"),
        ([sample(0), None], "a.b returned None among its samples"),
        (
            [sample(0), sample(4, [0.0, float("nan")])],
            "log_probs of sample 4 of group 0 are nan at position 1 of 2",
        ),
        ([sample(4, [float("-inf")])], "log_probs of sample 4 of group 0 are -inf at position 0 of 1"),
        ([sample(4, [float("inf"), float("-inf")])], "are inf at position 0 of 2"),
        ([sample(4, ["-1"])], r"log_probs of sample 4 of group 0 are \['-1'\], expected numbers"),
        ([sample(4, [None])], r"log_probs of sample 4 of group 0 are \[None\], expected numbers"),
    ],
)
def test_anything_else_is_named(samples, message):
    with pytest.raises(RolloutError, match=message):
        check_samples("a.b", samples)


def test_one_object_for_two_samples_is_named():
    one = sample(4)
    with pytest.raises(
        RolloutError,
        match=r"as its samples 0 and 2 \(sample 4 of group 0\), .* \(copy.deepcopy makes one\)",
    ):
        check_samples("a.b", [one, sample(5), one])


def test_a_status_may_come_as_text_and_is_told_once():
    take_notes()
    one, two = sample(4), sample(5)
    one.status = two.status = "truncated"
    check_samples("plug.in", [one, two])
    check_samples("plug.in", [one])
    assert one.status is two.status is Sample.Status.TRUNCATED
    assert len([text for text in take_notes() if text.startswith("plug.in sets status to text")]) == 1
    one.status = "done"
    with pytest.raises(RolloutError, match="status of sample 4 of group 0 is 'done'"):
        check_samples("plug.in", [one])
