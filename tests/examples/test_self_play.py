"""Who is asked what in the game, and who has won."""

import pytest

from examples.self_play import game, make_data
from slime.utils.types import Sample

OTHERS = {False: game.PAST, True: game.FIRST}


@pytest.fixture
def asked(monkeypatch):
    """Who was asked what; the model says two letters, the other one."""
    seen = []

    async def answer(args, turn, sampling_params):
        seen.append((turn.policy, turn.prompt))
        turn.response = "ab" if turn.policy is None else "c1"
        turn.status = Sample.Status.COMPLETED
        return turn

    monkeypatch.setattr(game, "generate", answer)
    monkeypatch.setattr(game, "GenerateState", lambda args: type("State", (), {"aborted": False}))
    return seen


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("side", make_data.SIDES)
async def test_players_speak_in_turn_and_hear_each_other(asked, side, evaluation) -> None:
    task = Sample(prompt="|", label=side, index=3)
    made = await game.play(None, task, {}, evaluation)
    other = OTHERS[evaluation]
    players = [None, other] if side == game.BEGINS else [other, None]
    assert [player for player, _ in asked] == players * game.TURNS
    said = {None: "ab", other: "c1"}
    assert asked[-1][1] == "|".join(["|", *(said[player] for player, _ in asked[:-1])])
    if evaluation:
        assert (made.policy, made.reward) == (None, 1.0)
        return
    assert [(turn.policy, turn.reward) for turn in made] == [
        (player, 1.0 if player is None else 0.0) for player, _ in asked
    ]
    assert {turn.rollout_id for turn in made} == {3}


@pytest.mark.parametrize(
    ("mine", "theirs", "worth"), [("ab", "a1", 1.0), ("a", "A9", 1.0), ("a", "b", 0.5), ("A", "b", 0.0)]
)
def test_more_lowercase_letters_win(mine, theirs, worth) -> None:
    turns = [Sample(response=mine), Sample(response=theirs, policy="past")]
    assert game.outcome(turns) == worth


async def test_a_game_that_is_stopped_is_given_up(asked, monkeypatch) -> None:
    monkeypatch.setattr(game, "GenerateState", lambda args: type("State", (), {"aborted": True}))
    task = Sample(prompt="|", label="begins", index=3)
    assert await game.play(None, task, {}) is task and task.status is Sample.Status.ABORTED
    assert len(asked) == 1
