"""Environments of ``verifiers``, played by the library itself; skipped where it is not installed."""

import importlib.util
import json
import subprocess
import sys

import pytest

from slime.rollout import verifiers_episodes
from slime.rollout.base_types import RolloutError
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.verifiers_episodes import VerifiersEpisodes
from slime.utils.types import Sample
from tests.engines.fake import EOS, TalkingEngine
from tests.page_runs import printed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"),
]
GAMES = "tests.environments.verifiers_games"
CALL = '<tool_call>\n{"name": "look", "arguments": {"shelf": "a"}}\n</tool_call>'
ROW = {"example_id": 0, "question": "What is on a?", "answer": "37", "info": {"shelf": "a"}}
MESSAGES = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is on a?"}]
PARAMS = {"max_new_tokens": 100, "temperature": 1.0}


@pytest.fixture(scope="module")
def shelves():
    """One process for all tests; it survives what episodes do, or starts again."""
    episodes = VerifiersEpisodes(GAMES)
    yield episodes
    episodes.host.close()


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.answer = lambda conversation: "37" if "37" in conversation else CALL
    engine.start()
    yield engine
    engine.stop()
    verifiers_episodes._provider.cache_clear()


def sample():
    return Sample(prompt=MESSAGES, metadata={"verifiers": dict(ROW)}, index=0, group_index=0)


def trained(tokenizer, sample):
    ids = sample.tokens[-sample.response_length :]
    return tokenizer.decode([token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask])


generate = VerifiersEpisodes(GAMES, {"shelves": "abcdefgh"})


async def test_its_rows_are_played_and_trained_on_token_by_token(
    engine, make_args, make_source, tokenizer, tmp_path
):
    path = tmp_path / "new/rows.jsonl"
    (page,) = printed("python -m slime.environments.verifiers_host")
    own = {"python": sys.executable, "gsm8k": GAMES, "train.jsonl": str(path)}
    command = [own.get(word, word) for word in page.words]
    said = subprocess.check_output([*command, "--options", '{"shelves": "abcdefgh"}'], text=True)
    assert said == f"8 rows in {path}\n"
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"prompt": MESSAGES, "metadata": {"verifiers": ROW}}
    args = make_args(
        prompt_data=str(path),
        label_key=None,
        apply_chat_template=False,
        custom_generate_function_path=f"{__name__}.generate",
        custom_rm_path=None,
        rollout_max_response_len=100,
    )
    try:
        output = await generate_rollout_async(args, 0, make_source(args))
    finally:
        generate.host.close()
    samples = [sample for group in output.samples for sample in group]
    assert [sample.reward for sample in samples] == [2.0] * 6
    for one in samples:
        assert trained(tokenizer, one) == f"{CALL}{EOS}37{EOS}"
        assert len(one.rollout_log_probs) == one.response_length
        assert "look(shelf)" in tokenizer.decode(one.tokens)
        assert one.metadata["metrics"]["right"] == 1.0 and one.metadata["round_number"] == 2


@pytest.mark.parametrize(("says", "reward", "turns"), [("38", 0.0, 1), (CALL, 0.0, 3)])
async def test_the_rubric_says_what_an_episode_is_worth(engine, make_args, shelves, says, reward, turns):
    engine.answer = lambda conversation: says
    made = await shelves(make_args(), sample(), PARAMS)
    assert (made.reward, made.metadata["round_number"], made.status) == (
        reward,
        turns,
        Sample.Status.COMPLETED,
    )


async def test_a_conversation_that_fills_its_context_is_worth_what_the_rubric_says(
    engine, make_args, shelves
):
    engine.answer = lambda conversation: CALL
    args = make_args(rollout_max_context_len=300)
    made = await shelves(args, sample(), PARAMS)
    assert made.reward == 0.0 and not made.remove_sample and len(made.tokens) <= 300


@pytest.mark.parametrize(
    ("says", "why"), [("exit", "its process ended with exit status 3"), ("loop", "no end within 5 s")]
)
async def test_an_episode_that_fails_is_of_unknown_worth_and_the_next_one_has_a_place(
    engine, make_args, shelves, says, why, monkeypatch
):
    monkeypatch.setattr(verifiers_episodes, "_CANCEL_S", 0.5)
    await shelves(make_args(), sample(), PARAMS)
    monkeypatch.setattr(shelves, "_limit_s", 5 if says == "loop" else 300)
    engine.answer = lambda conversation: says
    failed = await shelves(make_args(), sample(), PARAMS)
    assert failed.status is Sample.Status.FAILED and failed.remove_sample and failed.reward is None
    assert why in failed.metadata["grading_failure"]
    monkeypatch.setattr(shelves, "_limit_s", 300)
    engine.answer = lambda conversation: "37"
    assert (await shelves(make_args(), sample(), PARAMS)).reward == 2.0


async def test_an_episode_that_raises_is_of_unknown_worth(engine, make_args, shelves):
    broken = sample()
    del broken.metadata["verifiers"]["example_id"]
    failed = await shelves(make_args(), broken, PARAMS)
    assert failed.status is Sample.Status.FAILED and failed.response_length > 0
    assert failed.metadata["grading_failure"] == "KeyError: 'example_id'"


async def test_an_engine_that_fails_leaves_nothing_to_train_on(engine, make_args, shelves):
    from fastapi.responses import JSONResponse

    engine.answers["generate"] = JSONResponse({"error": "no"}, status_code=400)
    assert (await shelves(make_args(), sample(), PARAMS)).status is Sample.Status.ABORTED


async def test_a_process_that_was_killed_between_episodes_starts_again(engine, make_args, shelves):
    await shelves(make_args(), sample(), PARAMS)
    shelves.host.close()
    assert (await shelves(make_args(), sample(), PARAMS)).reward == 2.0


@pytest.mark.parametrize(("name", "options"), [("nowhere.at.all", {}), (GAMES, {"broken": True})])
async def test_an_environment_that_cannot_be_made_ends_the_run(engine, make_args, name, options):
    with pytest.raises(RolloutError, match=f"environment {name}: its process ended before it was ready"):
        await VerifiersEpisodes(name, options)(make_args(), sample(), PARAMS)


async def test_data_of_something_else_end_the_run(engine, make_args, shelves):
    with pytest.raises(RolloutError, match="verifiers_host ENVIRONMENT --rows FILE"):
        await shelves(make_args(), Sample(prompt="q", index=0), PARAMS)
