"""Environments of OpenEnv behind a server of the library's own; skipped where it is not installed."""

import importlib.util
import json

import pytest

from slime.environments import Answer
from slime.environments.protocol import Call
from tests.serving import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed"),
]


@pytest.fixture(scope="module")
def url():
    from tests.environments.openenv_games import guessing

    with served(guessing(max_sessions=2)) as port:
        yield f"http://127.0.0.1:{port}"


def made(url, **options):
    from slime.environments.openenv_text import OpenEnvText

    return OpenEnvText(url, **options)


def task(**metadata):
    return {"prompt": "", "label": None, "metadata": metadata}


async def test_the_text_of_a_turn_is_a_field_of_the_action(url):
    environment = made(url, field="message", action={"loud": True}, shown=["said"], instructions="Guess.")
    assert await environment.reset(task(), 7) == "Guess.\nA word of 7." and environment.tools == []
    step = await environment.step(Answer("no"))
    assert (step.observation, step.reward, step.done) == ("NO IS WRONG", 0.0, False)
    step = await environment.step(Answer("word7"))
    assert (step.reward, step.done) == (1.0, True)
    assert (
        await environment.reset(task(seed=3, options={"prefix": "Begin. "}), 7)
        == "Guess.\nBegin. A word of 3."
    )
    await environment.close()


async def test_a_call_of_a_tool_is_the_action_and_an_invalid_one_is_told(url):
    environment = made(url, action={"loud": False}, no_action_reward=-0.5)
    assert json.loads(await environment.reset(task(), 7)) == {"said": "A word of 7.", "tries": 0}
    (tool,) = environment.tools
    assert tool["function"]["parameters"]["properties"].keys() == {"message"}
    for answer in (
        Answer("word7"),
        Answer("", [Call("act", {"message": [1]})]),
        Answer("", [Call("act", {})]),
    ):
        step = await environment.step(answer)
        assert step.reward == -0.5 and "action" in step.observation and not step.done
    step = await environment.step(Answer("", [Call("act", {"message": "word7"})]))
    assert (step.reward, step.done, json.loads(step.observation)["tries"]) == (1.0, True, 1)
    await environment.close()


async def test_sessions_are_apart_and_one_too_many_is_an_error(url, monkeypatch):
    from slime.environments import openenv_text

    first, second, third = (made(url, field="message", action={"loud": False}) for _ in range(3))
    await first.reset(task(), 1)
    await second.reset(task(), 2)
    assert (await first.step(Answer("word1"))).done and not (await second.step(Answer("word1"))).done
    with monkeypatch.context() as short:
        short.setattr(openenv_text, "_ROOM_S", 0.3)
        with pytest.raises(
            RuntimeError, match=r"no session within 0.3 s: .* \(wanted: a max_concurrent_envs"
        ):
            await third.reset(task(), 3)
    await second.close()
    assert "of 3" in await third.reset(task(), 3), "there is room again"
    for environment in (first, second, third):
        await environment.close()


async def test_an_environment_that_raises_is_not_a_turn_of_the_model_s(url):
    environment = made(url, field="message", action={"loud": False})
    await environment.reset(task(), 1)
    with pytest.raises(RuntimeError, match="out of words"):
        await environment.step(Answer("raise"))
    await environment.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"field": "text"}, r"its actions have no 'text' \(wanted: of \['loud', 'message', 'metadata'\]\)"),
        ({"action": {"volume": 1}}, "its actions have no 'volume'"),
        ({"field": "message"}, r"its actions need \['loud'\] too"),
        ({"shown": ["told"]}, r"its observations have no \['told'\] \(wanted: of \['said', 'tries'\]\)"),
    ],
)
async def test_what_the_server_does_not_have_is_refused_by_name(url, options, named):
    environment = made(url, **options)
    with pytest.raises(ValueError, match=named):
        await environment.reset(task(), 1)
    await environment.close()


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"url 'ws://a' \(wanted: http://HOST:PORT"):
        made("ws://a")
