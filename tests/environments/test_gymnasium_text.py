"""Environments of Gymnasium, as text: held against Gymnasium itself."""

import random

import gymnasium
import pytest

from slime.environments import Answer
from slime.environments.gymnasium_text import GymnasiumText
from slime.rollout.environment_hosts import Processes

LAKE = {
    "id": "FrozenLake-v1",
    "options": {"render_mode": "ansi", "is_slippery": True},
    "actions": ["Left", "Down", "Right", "Up"],
}
BACKWARDS = "tests.environments.lookup:Backwards-v0"
PATH = "slime.environments.gymnasium_text.GymnasiumText"


def task(**metadata):
    return {"prompt": "", "label": None, "metadata": metadata}


@pytest.mark.parametrize("seed", range(3))
def test_an_episode_is_that_of_gymnasium(seed):
    ours, theirs = GymnasiumText(**LAKE), gymnasium.make(LAKE["id"], **LAKE["options"])
    theirs.reset(seed=seed)
    shown, rng = ours.reset(task(), seed), random.Random(seed)
    assert shown.splitlines()[0] == "[S]FFF" and len(shown.splitlines()) == 4
    for _ in range(200):
        action = rng.randrange(4)
        _, reward, terminated, truncated, _ = theirs.step(action)
        step = ours.step(Answer(f"I go {LAKE['actions'][action].lower()}."))
        assert (step.reward, step.done) == (reward, terminated or truncated)
        plain = theirs.render().replace("\x1b[41m", "[").replace("\x1b[0m", "]").strip()
        assert step.observation == plain
        if step.done:
            theirs.reset(seed=seed)
            ours.reset(task(), seed)


def test_the_last_action_that_is_named_counts_and_nothing_happens_without_one():
    lake = GymnasiumText(**{**LAKE, "options": {"render_mode": "ansi", "is_slippery": False}})
    lake.reset(task(), 0)
    assert "S[F]FF" in lake.step(Answer("Not down, but RIGHT!")).observation
    for text in ("", "sideways", "rightly"):
        step = lake.step(Answer(text))
        assert step.observation == "That is no action (wanted: left, down, right, up)."
        assert (step.reward, step.done) == (0.0, False)
    assert "S\nF[F]FF" not in lake.step(Answer("down")).observation


def test_actions_without_names_are_numbers_and_observations_without_a_rendering_too():
    lake = GymnasiumText("FrozenLake-v1", {"is_slippery": False}, no_action_reward=-0.5, instructions="Go.")
    assert lake.reset(task(), 0) == "Go.\n0"
    assert lake.step(Answer("2")).observation == "1"
    assert lake.step(Answer("7")).reward == -0.5


def test_text_goes_in_and_out():
    game = GymnasiumText(BACKWARDS)
    word = game.reset(task(options={"word": "pots"}), 0)
    assert word == "pots" and game.step(Answer("pots")).observation == "no"
    step = game.step(Answer("stop"))
    assert (step.observation, step.reward, step.done) == ("yes", 1.0, True)
    assert "wanted: Text(" in game.step(Answer("x" * 99)).observation
    words = {game.reset(task(seed=seed), 0) for seed in range(8)}
    assert len(words) > 1 and game.reset(task(seed=3), 0) == game.reset(task(), 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"actions": ["left"]}, "1 names for 4 actions"),
        ({"id": "MountainCarContinuous-v0", "actions": []}, "its actions are Box"),
        ({"id": BACKWARDS, "actions": ["a"]}, "its actions are Text"),
    ],
)
def test_actions_that_words_cannot_tell_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        GymnasiumText(**{"id": "FrozenLake-v1", **options})


@pytest.mark.slow
async def test_it_runs_in_a_process_of_its_own():
    hosts = Processes(PATH, LAKE, 1, 60)
    try:
        async with hosts.episode(None) as episode:
            opening = await episode.begin(task(), 0)
            step = await episode.step(Answer("down"))
    finally:
        hosts.close()
    assert opening.messages[0]["content"].startswith("[S]FFF")
    assert "[" in step.observation and step.reward == 0.0
