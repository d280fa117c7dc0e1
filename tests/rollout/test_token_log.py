"""The files of the token log: what is read of them after a process was killed, and what they may hold."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.token_log import LoggedAnswer, TokenLog, read_answers

FIRST = LoggedAnswer(
    *(0, 3, "one", 7),
    prompt=[9, 8],
    tokens=[1, 2],
    log_probs=[-0.1, -1 / 3],
    loss_mask=[0, 1],
    spans=[(None, 1), ("4", 1)],
    versions=["4"],
)
LAST = LoggedAnswer(
    *(0, 3, "one", 7),
    prompt=[],
    start=2,
    status="completed",
    tokens=[3],
    log_probs=[-1e-9],
    loss_mask=[1],
    spans=[(None, 1), ("4", 1), ("5", 1)],
    versions=["4", "5"],
    response="abc",
)
OTHER = replace(FIRST, index=4, attempt="two")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def log(directory):
    log = TokenLog(directory, max_bytes=10_000)
    log.begin([])
    return log


def lines_of(directory):
    (path,) = directory.glob("*.jsonl")
    return path, path.read_bytes().splitlines(keepends=True)


def test_an_answer_is_read_as_it_was_when_it_was_logged_last(log, directory):
    assert all([log.append(FIRST), log.append(OTHER), log.append(LAST)])
    answers, problems = read_answers(directory)
    assert not problems and list(answers) == [(0, 3), (0, 4)]
    found = answers[0, 3]
    assert (found.prompt, found.tokens, found.loss_mask) == ([9, 8], [1, 2, 3], [0, 1, 1])
    assert found.log_probs == [-0.1, -1 / 3, -1e-9]  # to the last bit
    assert [tuple(span) for span in found.spans] == LAST.spans and found.versions == ["4", "5"]
    assert (found.status, found.response, found.rollout) == ("completed", "abc", 7)
    assert answers[0, 4].tokens == [1, 2] and answers[0, 4].response is None


def test_a_last_line_that_a_crash_has_torn_is_skipped(log, directory):
    log.append(FIRST)
    log.append(LAST)
    path, lines = lines_of(directory)
    whole = path.read_bytes()
    for length in range(len(lines[0]), len(whole)):
        path.write_bytes(whole[:length])
        answers, problems = read_answers(directory)
        assert not problems and answers[0, 3].tokens == [1, 2], length


def test_a_damaged_line_is_named_and_what_came_after_it_is_not_put_in_its_place(log, directory):
    for record in (FIRST, LAST, OTHER):
        log.append(record)
    path, lines = lines_of(directory)
    path.write_bytes(lines[0].replace(b"[1,2]", b"[1,7]") + lines[1] + lines[2])
    answers, problems = read_answers(directory)
    assert list(answers) == [(0, 4)]
    (problem,) = problems
    assert problem.startswith(f"{path}:1: damaged")


def test_what_goes_on_from_another_attempt_is_not_added(log, directory):
    log.append(FIRST)
    log.append(replace(LAST, attempt="of an attempt whose first line is damaged"))
    assert read_answers(directory)[0][0, 3].tokens == [1, 2]


def test_another_file_takes_the_place_of_those_before_it(log, directory):
    log.append(FIRST)
    log.append(OTHER)
    kept = read_answers(directory)[0][0, 4]
    log.begin([kept])
    assert log.append(replace(LAST, index=4, attempt="two"))
    path, lines = lines_of(directory)
    assert path.name == "tokens_00000001.jsonl" and len(lines) == 2
    assert read_answers(directory)[0][0, 4].tokens == [1, 2, 3]


def test_no_more_than_the_limit_is_written_until_another_file_begins(directory):
    log = TokenLog(directory, max_bytes=600)
    log.begin([])
    written = [log.append(FIRST) for _ in range(5)]
    path, _ = lines_of(directory)
    assert written[0] and not written[-1] and written == sorted(written, reverse=True)
    assert path.stat().st_size <= 600
    assert log.failure == f"{directory} would have more than 600 bytes"
    log.begin([])
    assert log.failure is None and log.append(FIRST)


def test_a_disk_that_is_full_ends_the_file_and_not_the_run(log, directory):
    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    log._file, _ = Full(), log._file.close()
    assert not log.append(FIRST) and "No space left" in log.failure
    log.begin([])
    assert log.append(FIRST)


def test_two_runs_do_not_share_a_directory(log, directory):
    """The lock is of the process, and goes with it."""
    script = "import sys; from pathlib import Path; from slime.rollout.token_log import TokenLog\n"
    script += "TokenLog(Path(sys.argv[1]), 1)"
    run = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True)
    assert f"{RolloutError.__name__}: --token-log-dir {directory}: another run writes there" in run.stderr


def test_a_line_is_json_behind_its_checksum(log, directory):
    log.append(FIRST)
    _, (line,) = lines_of(directory)
    assert json.loads(line[9:])["tokens"] == [1, 2]
