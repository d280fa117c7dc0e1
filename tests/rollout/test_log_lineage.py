"""Which answers a run may go on with that has gone back to a checkpoint."""

import pytest

from slime.rollout.log_lineage import Lineage, within
from slime.rollout.token_log import LoggedAnswer

ANSWER = LoggedAnswer(
    *(0, 3, "one", 7),
    prompt=[9],
    status="completed",
    tokens=[1, 2, 3, 4, 5],
    log_probs=[-0.1, -0.2, -0.3, -0.4, -0.5],
    loss_mask=[0, 1, 1, 1, 1],
    spans=[(None, 1), ("4", 2), ("5", 2)],
    versions=["4", "5"],
    response="abc",
)


@pytest.fixture
def lineage(tmp_path):
    found = Lineage(tmp_path)
    for rollout_id, version in ((0, 1), (1, 3), (2, 4)):
        found.begin(rollout_id, version, "saved")
    return found


def test_a_run_knows_the_weights_with_which_the_rollout_after_its_checkpoint_began(lineage, tmp_path):
    assert [lineage.newest(rollout_id, "saved") for rollout_id in (0, 1, 2, 9)] == [3, 4, 4, 4]
    assert Lineage(tmp_path).newest(0, str(tmp_path.cwd() / "saved")) == 3
    assert lineage.newest(0, "elsewhere") is None and lineage.newest(0, None) is None


def test_a_run_that_goes_back_forgets_what_came_after(lineage):
    lineage.begin(1, 9, "saved")
    assert [lineage.newest(rollout_id, "saved") for rollout_id in (0, 1)] == [9, 9]
    lineage.begin(0, 1, "another")
    assert lineage.newest(5, "another") == 1 and lineage.newest(5, "saved") is None


def test_of_a_file_that_somebody_has_torn_nothing_is_known(lineage, tmp_path):
    (tmp_path / "rollouts.json").write_text('{"save": "saved", "beg')
    assert lineage.newest(0, "saved") is None


def test_an_answer_is_kept_as_far_as_known_weights_made_it():
    assert within(ANSWER, newest=5, oldest=None) is ANSWER
    part = within(ANSWER, newest=4, oldest=None)
    assert (part.tokens, part.log_probs, part.loss_mask) == ([1, 2, 3], [-0.1, -0.2, -0.3], [0, 1, 1])
    assert (part.spans, part.versions) == ([(None, 1), ("4", 2)], ["4"])
    assert (part.status, part.response) == ("aborted", None)
    assert ANSWER.tokens == [1, 2, 3, 4, 5]


def test_nothing_is_left_of_one_that_is_too_old():
    assert within(ANSWER, newest=5, oldest=4) is ANSWER
    assert within(ANSWER, newest=5, oldest=5) is None


def test_a_version_that_is_no_number_is_not_known():
    odd = LoggedAnswer(
        *(0, 3, "one", 7), prompt=[9], tokens=[1], spans=[("default", 1)], versions=["default"]
    )
    assert within(odd, newest=5, oldest=None) is None
