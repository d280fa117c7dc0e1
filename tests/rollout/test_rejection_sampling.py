import json

import pyarrow.parquet
import pytest

from slime.config.rejection import RejectionConfig
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate_state import GenerateState
from slime.rollout.rejection_sampling import generate_rollout, sample_by_rejection, to_row, write_rows
from slime.utils.data import RecordKeys, read_rows
from slime.utils.types import Sample
from tests.rollout.test_sglang_rollout import PLUGINS, balanced, question

ANSWERS = {0: "a0", 1: "no", 2: "a2"}


@pytest.fixture
def rejection_args(make_args, tmp_path):
    return lambda **overrides: make_args(
        apply_chat_template=False,
        custom_rm_path=PLUGINS + "label_rm",
        rejection_output=str(tmp_path / "out"),
        save=str(tmp_path / "out"),
        load=str(tmp_path / "out"),
        **overrides,
    )


@pytest.fixture
def right_and_wrong(engine):
    engine.answer = lambda conversation: ANSWERS.get(question(conversation), f"a{question(conversation)}")
    return engine


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_hooks_of_samples_are_told_of_the_rollout(right_and_wrong, rejection_args, make_source):
    args = rejection_args(rollout_sample_hook_path=[PLUGINS + "cut_hook"])
    output = await sample_by_rejection(args, 4, make_source(args))
    assert {sample.metadata["hooked"] for group in output.samples for sample in group} == {(4, False)}


async def test_accepted_answers_are_conversations_to_imitate(
    right_and_wrong, rejection_args, make_source, tmp_path
):
    args = rejection_args(rejection_max_per_prompt=1)
    source = make_source(args)
    output = await sample_by_rejection(args, 0, source)
    rows = read(tmp_path / "out" / "accepted_000000.jsonl")
    assert [row["messages"] for row in rows] == [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in (0, 2)
    ]
    assert [(row["reward"], row["label"], row["group_index"]) for row in rows] == [
        (1.0, "a0", 0),
        (1.0, "a2", 2),
    ]
    assert len(output.samples) == 3
    assert output.metrics["rejection/accepted"] == 2
    assert output.metrics["rejection/acceptance_rate"] == 2 / 6
    assert output.metrics["rollout/dropped/rejected"] == 1
    assert source.ledger.trained == 2 and source.ledger.dropped == {"rejected": 1}
    assert balanced(source)
    assert [
        row.label
        for row in read_rows(str(tmp_path / "out/accepted_000000.jsonl"), RecordKeys("messages", "label"))
    ]


async def test_parquet_holds_the_same(right_and_wrong, rejection_args, make_source, tmp_path):
    args = rejection_args(rejection_format="parquet")
    await sample_by_rejection(args, 4, make_source(args))
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "accepted_000004.parquet").to_pylist()
    assert [row["group_index"] for row in rows] == [0, 0, 2, 2]
    keys = RecordKeys("messages", "label", None, "metadata")
    assert len(list(read_rows(str(tmp_path / "out/accepted_000004.parquet"), keys))) == 4


async def test_a_template_that_was_applied_leaves_text(
    right_and_wrong, rejection_args, make_source, tmp_path
):
    args = rejection_args()
    args.apply_chat_template = True
    await sample_by_rejection(args, 0, make_source(args))
    row = read(tmp_path / "out" / "accepted_000000.jsonl")[0]
    assert row["prompt"].endswith("q0<|im_end|>\n<|im_start|>assistant\n")
    assert row["response"] == "a0<|im_end|>"


async def test_the_best_samples_of_a_prompt_are_taken_first(engine, rejection_args, make_source, tmp_path):
    args = rejection_args(n_samples_per_prompt=4, rejection_max_per_prompt=2, rejection_min_reward=1.0)
    args.custom_rm_path, args.group_rm = PLUGINS + "group_rm", True  # rewards 0, 1, 2, 3
    await sample_by_rejection(args, 0, make_source(args))
    assert [row["reward"] for row in read(tmp_path / "out" / "accepted_000000.jsonl")] == [2.0, 3.0] * 3


async def test_a_reward_may_be_the_least_one(engine, rejection_args, make_source, tmp_path):
    args = rejection_args(n_samples_per_prompt=4, rejection_min_reward=2.0)
    args.custom_rm_path, args.group_rm = PLUGINS + "group_rm", True  # rewards 0, 1, 2, 3
    await sample_by_rejection(args, 0, make_source(args))
    assert [row["reward"] for row in read(tmp_path / "out" / "accepted_000000.jsonl")] == [2.0, 3.0] * 3


async def test_filters_apply(right_and_wrong, rejection_args, make_source, tmp_path):
    args = rejection_args(dynamic_sampling_filter_path=PLUGINS + "drop_odd_groups")
    args.rollout_sample_filter_path = PLUGINS + "remove_short"
    source = make_source(args)
    output = await sample_by_rejection(args, 0, source)
    assert [row["index"] for row in read(tmp_path / "out" / "accepted_000000.jsonl")] == [1, 5]
    assert output.metrics["rollout/dynamic_filter/drop_odd"] == source.ledger.filtered == 1
    assert balanced(source)


async def test_a_killed_run_leaves_out_no_prompt_and_writes_none_twice(
    right_and_wrong, rejection_args, make_source, tmp_path
):
    args = rejection_args()
    source = make_source(args)
    await sample_by_rejection(args, 0, source)
    source.save(0)
    await sample_by_rejection(args, 1, source)  # killed before its state was saved
    source = make_source(args)
    source.load(0)
    for rollout_id in (1, 2):
        await sample_by_rejection(args, rollout_id, source)
    rows = [row for path in sorted((tmp_path / "out").glob("*.jsonl")) for row in read(path)]
    assert [row["index"] for row in rows] == [i for i in range(18) if i not in (2, 3)]


async def test_a_rollout_without_a_single_answer_says_so(engine, rejection_args, make_source):
    args = rejection_args(n_samples_per_prompt=1, custom_generate_function_path=PLUGINS + "always_aborted")
    with pytest.raises(RolloutError, match="none of 3 prompts was answered"):
        await sample_by_rejection(args, 0, make_source(args))


async def test_a_group_that_was_given_up_is_left_out(right_and_wrong, rejection_args, make_source, tmp_path):
    args = rejection_args(custom_generate_function_path=PLUGINS + "giving_up_generate")  # sample 3
    source = make_source(args)
    output = await sample_by_rejection(args, 0, source)
    assert len(output.samples) == 2 and output.metrics["rejection/acceptance_rate"] == 1.0
    assert source.ledger.dropped == {"aborted": 1} and balanced(source)
    assert output.metrics["rollout/dropped/aborted"] == 1


def test_the_rollout_function_samples_and_evaluates(right_and_wrong, rejection_args, make_source):
    """Also after a rollout that had enough, and with the prompt that a chat template makes."""
    args = rejection_args(eval_datasets=[])
    GenerateState(args).aborted = True
    assert isinstance(generate_rollout(args, 0, make_source(args)), RolloutFnTrainOutput)
    asked = right_and_wrong.tokenizer.decode(right_and_wrong.seen("generate")[0]["input_ids"])
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert isinstance(generate_rollout(args, 0, make_source(args), evaluation=True), RolloutFnEvalOutput)


def test_rows_hold_what_the_model_said_and_the_template_does_not_add(rejection_args):
    state = GenerateState(rejection_args())
    prompt, said, end = ([9, 8], state.tokenizer("ab")["input_ids"], [state.tokenizer.eos_token_id])
    asked = [{"role": "user", "content": "q"}]

    def row(answer, **fields):
        sample = Sample(prompt=asked, tokens=prompt + answer, response_length=len(answer), **fields)
        return to_row(state, sample)

    for answer, content in ((said + end, "ab"), (said, "ab"), ([], "")):
        assert row(answer)["messages"] == [*asked, {"role": "assistant", "content": content}]
    by_turns = row(said, loss_mask=[1, 0], reward=1.0, label="l", index=3, group_index=1)
    assert by_turns["prompt"] == state.tokenizer.decode(prompt) and "messages" not in by_turns
    assert (by_turns["reward"], by_turns["label"], by_turns["index"]) == (1.0, "l", 3)


def test_a_file_is_written_anew_and_alone(tmp_path):
    config = RejectionConfig(rejection_output=str(tmp_path / "a" / "b"), rejection_format="jsonl")
    for rows in ([{"x": 1}, {"x": 2}], [{"x": 3}]):
        path = write_rows(config, 7, rows)
        assert read(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["accepted_000007.jsonl"]
