import json
import re

import pytest

from examples.calculator_tool import make_data
from examples.calculator_tool.calculator import answer_call
from examples.calculator_tool.generate import render_tool_turn
from examples.calculator_tool.reward import reward
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample

# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("<tool_call>47*28</tool_call><|im_end|>", "1316"),
        ("<tool_call>05*37</tool_call>", "185"),
        ("<tool_call>9-12</tool_call>", "-3"),
        ("<tool_call>1+1</tool_call><tool_call>2+2</tool_call>", "2"),
        ("<tool_call>47*28", None),
        ("<tool_call>__import__('os')</tool_call>", None),
        ("<tool_call>2**99</tool_call>", None),
        ("<tool_call>9999999*1</tool_call>", None),
        ("<tool_call>٣*٤</tool_call>", None),
        ("\\boxed{3}", None),
    ],
)
def test_only_two_integers_and_an_operator_are_a_call(text, result):
    assert answer_call(text) == result


def test_the_tool_turn_continues_the_chat_template(tokenizer):
    call = {"role": "assistant", "content": "<tool_call>1+1</tool_call>"}
    before = [{"role": "user", "content": "1+1"}, call]
    whole = tokenizer.apply_chat_template(
        [*before, {"role": "tool", "content": "2"}], tokenize=False, add_generation_prompt=True
    )
    spoken = tokenizer.apply_chat_template(before, tokenize=False).removesuffix("\n")
    assert spoken + render_tool_turn(tokenizer, "2") == whole


def tool_user(conversation):
    question = re.search(r"user\n(\S+)<\|im_end", conversation)[1]
    result = re.search(r"<tool_response>(.*?)</tool_response>", conversation)
    return f"\\boxed{{{result[1]}}}" if result else f"<tool_call>{question}</tool_call>"


@pytest.fixture
def calculator_args(make_args, tmp_path):
    def make(**overrides):
        make_data.main(["--output", str(tmp_path)])
        return make_args(
            prompt_data=str(tmp_path / "rl.jsonl"),
            custom_generate_function_path="examples.calculator_tool.generate.generate",
            custom_rm_path="examples.calculator_tool.reward.reward",
            **overrides,
        )

    return make


async def test_a_model_that_asks_is_answered_and_rewarded(engine, calculator_args, make_source, tokenizer):
    args = calculator_args()
    engine.answer = tool_user
    output = await generate_rollout_async(args, 0, make_source(args))
    for sample in [s for group in output.samples for s in group]:
        assert sample.reward == 1.0
        assert sample.metadata["round_number"] == 2
        assert tokenizer.decode(sample.tokens) == sample.prompt + sample.response
        trained = [
            t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m
        ]
        assert re.fullmatch(
            r"<tool_call>\d+\*\d+</tool_call><\|im_end\|>\\boxed\{\d+\}<\|im_end\|>",
            tokenizer.decode(trained),
        )
        assert len(sample.rollout_log_probs) == sample.response_length


@pytest.mark.parametrize("answer", ["<tool_call>05**</tool_call>", "\\boxed{1}", "", "<tool_call>" * 30])
async def test_text_that_is_no_call_ends_the_conversation_without_a_reward(
    engine, calculator_args, make_source, answer
):
    args = calculator_args()
    engine.answer = lambda conversation: answer
    output = await generate_rollout_async(args, 0, make_source(args))
    assert {s.reward for group in output.samples for s in group} == {0.0}
    assert {s.metadata["round_number"] for group in output.samples for s in group} == {1}


async def test_an_aborted_conversation_starts_over(engine, calculator_args, make_source):
    args = calculator_args(partial_rollout=True, over_sampling_batch_size=5)
    engine.answer = tool_user
    seen = []

    def delay(conversation):
        if conversation not in seen:
            seen.append(conversation)
        return 0.0 if seen.index(conversation) < 6 and len(seen) < 9 else 0.05

    engine.delay = delay
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    engine.delay = lambda conversation: 0.0
    output = await generate_rollout_async(args, 1, source)
    assert {s.reward for group in output.samples for s in group} == {1.0}
    assert {s.metadata["round_number"] for group in output.samples for s in group} == {2}


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (["<tool_call>2*3</tool_call>", "\\boxed{6}"], 1.0),
        (["\\boxed{5} \\boxed{ 6 }<|im_end|>"], 1.0),
        (["\\boxed{6} or \\boxed{5}"], 0.0),
        (["\\boxed{6}", "never mind"], 0.0),
        (["\\boxed{6"], 0.0),
        (["6"], 0.0),
        (["\\boxed{6.0}"], 0.0),
    ],
)
async def test_only_the_last_box_of_the_last_turn_counts(turns, wanted):
    assert await reward(None, Sample(label="6", metadata={"turns": turns})) == wanted


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_are_disjoint_and_follow_the_seed(tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        make_data.main(["--output", str(tmp_path / name), "--seed", seed])
    files = ("sft.jsonl", "rl.jsonl", "eval.jsonl")
    for file in files:
        assert (tmp_path / "a" / file).read_text() == (tmp_path / "b" / file).read_text()
        assert (tmp_path / "a" / file).read_text() != (tmp_path / "c" / file).read_text()
    sft, rl, evaluation = (read(tmp_path / "a" / file) for file in files)
    assert (len(sft), len(rl), len(evaluation)) == (6000, 1600, 128)
    questions = [
        {(row.get("messages") or row["prompt"])[0]["content"] for row in rows}
        for rows in (sft, rl, evaluation)
    ]
    assert sum(map(len, questions)) == 7728 == len(set.union(*questions))
    swapped = {"*".join(reversed(question.split("*"))) for question in questions[2]}
    assert not swapped & (questions[0] | questions[1])
    assert sum(len(row["messages"]) == 4 for row in sft) / 6000 == pytest.approx(0.4, abs=0.03)
    for row in sft:
        assert row["messages"][-1]["content"] == f"\\boxed{{{answer_call_of(row['messages'][0])}}}"
    assert all(row["label"] == answer_call_of(row["prompt"][0]) for row in rl + evaluation)


def answer_call_of(message):
    return answer_call(f"<tool_call>{message['content']}</tool_call>")


def test_more_rows_than_there_are_products_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        make_data.main(["--output", str(tmp_path), "--rl-rows", "5000"])
    assert error.value.code == 2
    assert "there are 7921 products" in capsys.readouterr().err
