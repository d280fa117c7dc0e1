"""Graders on a table of answers: docs/graders.md says where they differ."""

import pytest

from tests.rollout.graders.verdicts import PAGE, page, verdicts


@pytest.fixture(scope="module")
def found():
    return list(verdicts())


def test_the_table_is_long_and_has_wrong_answers_too(found):
    assert len(found) >= 300
    assert sum(not verdict.row.right for verdict in found) >= 100


def test_we_say_what_math_verify_says_by_itself(found):
    assert [verdict.row for verdict in found if verdict.ours != verdict.alone] == []


def test_no_grader_is_far_from_the_truth(found):
    for name, least in (("ours", 0.94), ("compat", 0.87)):
        agreeing = sum(getattr(verdict, name) == verdict.row.right for verdict in found)
        assert agreeing >= least * len(found)
    wrongly_right = [v.row for v in found if (v.ours or v.compat) and not v.row.right]
    assert len(wrongly_right) <= 10


def test_the_page_lists_all_differences(found):
    assert PAGE.read_text(encoding="utf-8") == page(found), "python -m tests.rollout.graders.verdicts --write"
