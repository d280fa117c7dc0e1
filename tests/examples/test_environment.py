"""A model that walks over a frozen lake, with a scripted engine."""

import json

import pytest

from examples.environment import lake, make_data
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.engines.fake import EOS, HEADER, TalkingEngine

# The tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403

PATH = ("right", "right", "down", "down")


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.answer = lambda conversation: f"I go {PATH[conversation.count(HEADER)]}."
    engine.start()
    yield engine
    engine.stop()
    lake.generate._hosts.close()


@pytest.fixture
def lake_args(make_args, tmp_path):
    make_data.main(["--output", str(tmp_path / "lake.jsonl"), "--rows", "4"])
    return make_args(
        prompt_data=str(tmp_path / "lake.jsonl"),
        label_key=None,
        apply_chat_template=False,
        custom_generate_function_path="examples.environment.lake.generate",
        custom_rm_path=None,
    )


async def test_whoever_knows_the_way_arrives(engine, lake_args, make_source, tokenizer):
    output = await generate_rollout_async(lake_args, 0, make_source(lake_args))
    samples = [sample for group in output.samples for sample in group]
    assert [sample.reward for sample in samples] == [1.0] * 6
    for sample in samples:
        assert sample.metadata["step_rewards"] == [0.0, 0.0, 0.0, 1.0]
        assert sample.metadata["turns"] == [f"I go {where}.{EOS}" for where in PATH]
        text = tokenizer.decode(sample.tokens)
        assert lake.INSTRUCTIONS in text and "[S]FF\nFHF\nFFG" in text and "SF[F]\nFHF\nFFG" in text
    assert 0 < len(lake.generate._hosts.pids) <= 4


@pytest.mark.parametrize(
    ("where", "turns", "status"),
    [
        (("right", "down"), 2, Sample.Status.COMPLETED),  # into the hole
        (("left",) * 8, 8, Sample.Status.TRUNCATED),
        (("hm",) * 8, 8, Sample.Status.TRUNCATED),
    ],
)
async def test_whoever_does_not_earns_nothing(engine, lake_args, where, turns, status):
    engine.answer = lambda conversation: where[conversation.count(HEADER)]
    sample = await lake.generate(lake_args, Sample(prompt="", index=0, group_index=0), {"max_new_tokens": 32})
    assert (sample.reward, sample.status, len(sample.metadata["turns"])) == (0.0, status, turns)
    assert ("That is no action" in sample.response) == (where[0] == "hm")


def test_rows_are_episodes(tmp_path):
    make_data.main(["--output", str(tmp_path / "new" / "lake.jsonl"), "--rows", "3"])
    rows = [json.loads(line) for line in (tmp_path / "new" / "lake.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": f"episode {number}", "metadata": {}} for number in range(3)]
