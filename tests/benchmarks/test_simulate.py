"""What is asked of the simulator and cannot be is refused by name; a seed that fails is shown again."""

import pytest

from benchmarks.simulate import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--histories", "-3"], "--histories: '-3' (wanted: a whole number from 0 on"),
        (["--first", "-5"], "--first: '-5' (wanted: a whole number from 0 on"),
        (["--bugs", "-1"], "--bugs: '-1' (wanted: a whole number from 0 on"),
        (["--processes", "0"], "--processes: '0' (wanted: a whole number from 1 on"),
        (["--seed", "17a"], "--seed: '17a' (wanted: a whole number from 0 on"),
        (
            ["--bug", "the version of the weights falls"],
            "--bug: it is planted in one history (wanted: --seed",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_seed_that_fails_is_shown_and_ends_with_status_1(capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["--seed", "1", "--bug", "the version of the weights falls"])
    assert "seed 1: " in capsys.readouterr().out
