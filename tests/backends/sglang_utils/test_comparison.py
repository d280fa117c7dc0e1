"""Requests one by one: where the embedded engine and SGLang differ stands in ``conformance.yaml``."""

import pytest

from tests.backends.sglang_utils.comparison import (
    ABSENT,
    ANSWERS,
    Request,
    ask,
    client,
    differences,
    gone,
    read_answers,
    read_list,
    unexplained,
)
from tests.each import hold_each
from tools.generate_conformance_docs import PAGE, conformance_page
from tools.make_tiny_model import make_tokenizer

REQUESTS, NOTES = read_list()


@pytest.mark.slow
def test_each_request_is_answered_as_sglang_does_but_for_what_is_listed(engine_under_test) -> None:
    """The embedded engine differs from the recorded answers as listed; an SGLang at hand in nothing."""
    if engine_under_test.tokenizer.get_vocab() != make_tokenizer().get_vocab():
        pytest.skip("answers are recorded of the tests' own checkpoint")
    recorded = read_answers()
    embedded = engine_under_test.is_embedded
    asked = [request for request in REQUESTS if embedded or not request.kills]
    with client(engine_under_test.url) as http:

        def hold(request: Request) -> None:
            if request.kills:
                assert ask(http, request)["status"] == 400
                return
            found = differences(ask(http, request), recorded[request.id])
            allowed = request.differs if embedded else {}
            assert not unexplained(found, allowed), "not listed"
            assert not gone(found, allowed), "listed, and gone"

        hold_each(asked, hold, name=lambda request: request.id)


def test_the_page_is_fresh() -> None:
    command = "run python tools/generate_conformance_docs.py"
    assert PAGE.read_text(encoding="utf-8") == conformance_page(), command


def test_each_difference_says_what_both_do_and_why() -> None:
    told = [entry for entry in REQUESTS if entry.differs or entry.kills]
    assert [entry.id for entry in REQUESTS if entry.about and entry not in told] == []
    for entry in (*told, *NOTES):
        assert all((entry.about, entry.sglang, entry.embedded, entry.why)), entry.id


def test_an_unlisted_difference_and_a_listed_one_that_is_gone_are_found() -> None:
    theirs = {"status": 200, "text": "b", "usage": None}
    assert differences({"status": 400}, theirs) == {"status": 400}
    found = differences({"status": 200, "text": "c"}, theirs)
    assert found == {"text": "c", "usage": ABSENT}
    assert unexplained(found, {"text": "c", "us*": ABSENT}) == {} == unexplained(found, {"*": "any"})
    assert unexplained(found, {"text": "d"}) == found
    assert gone(found, {"text": "c", "ids": ABSENT, "usage": None}) == ["ids", "usage"]


def test_each_request_has_a_recorded_answer() -> None:
    command = "run python -m tests.backends.sglang_utils.comparison URL"
    assert read_answers().keys() == {request.id for request in REQUESTS if not request.kills}, command
    assert ANSWERS.stat().st_size < 200_000
