import pytest

from examples.retool.calls import find_code, has_answer
from examples.retool.reward import reward
from slime.agent.sandbox import LocalSandbox, SandboxError
from slime.rollout.base_types import RolloutError
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample

# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("so <code>print(1)</code>", "print(1)"),
        ("<code>\n```python\nprint(1)\n```\n</code>", "print(1)"),
        ("```python\nprint(2)\n``` and so", "print(2)"),
        (
            '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(3)"}}</tool_call>',
            "print(3)",
        ),
        ('<tool_call>{"name": "search", "arguments": {"code": "x"}}</tool_call>', None),
        ("<tool_call>{broken}</tool_call>", None),
        ("<code>1</code> then <code>2</code>", "2"),
        ("<code>print(1)", None),
        ("nothing", None),
    ],
)
def test_code_is_found_in_each_of_its_forms(text, code):
    assert find_code(text) == code


def test_an_answer_is_a_box_after_its_word():
    assert has_answer("Answer: \\boxed{1}") and not has_answer("\\boxed{1}")


@pytest.fixture
async def sandboxed():
    try:
        async with LocalSandbox():
            pass
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def retool_args(make_args):
    def make(**overrides):
        own = {key: overrides.pop(key) for key in list(overrides) if key.startswith("retool_")}
        args = make_args(
            custom_generate_function_path="examples.retool.generate.generate",
            custom_rm_path="examples.retool.reward.reward",
            reward_key="score",
            rollout_max_response_len=600,
            rollout_batch_size=1,
            over_sampling_batch_size=1,
            **overrides,
        )
        vars(args).update(own)
        return args

    return make


class Speaker:
    """The engine's side of one assistant turn that is interrupted by results."""

    def __init__(self, engine, tokenizer, turns):
        self.tokenizer, self.turns, self.asked = tokenizer, turns, []
        engine.generate = self.generate

    async def generate(self, body):
        self.asked.append(body)
        said = self.tokenizer.decode(body["input_ids"])
        turn = said.count("</interpreter>") + said.count("Let me try again")
        text = self.turns[min(turn, len(self.turns) - 1)]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        limit = body["sampling_params"]["max_new_tokens"]
        kept = ids[:limit]
        return {
            "text": self.tokenizer.decode(kept),
            "meta_info": {
                "finish_reason": {"type": "stop" if len(ids) <= limit else "length"},
                "output_token_logprobs": [[-0.25, token, None] for token in kept],
                "weight_version": "1",
            },
        }


async def test_code_is_run_and_its_result_is_not_trained_on(
    sandboxed, engine, retool_args, make_source, tokenizer
):
    args = retool_args()
    turns = ["<code>print(47 * 28)</code>", "Answer: \\boxed{a0}<|im_end|>"]
    speaker = Speaker(engine, tokenizer, turns)
    output = await generate_rollout_async(args, 0, make_source(args))
    for sample in output.samples[0]:
        assert sample.reward["score"] == 1.0 and sample.reward["tool_calls"] == 1
        assert sample.metadata["round_number"] == 2 and sample.status == Sample.Status.COMPLETED
        assert tokenizer.decode(sample.tokens) == sample.prompt + sample.response
        assert "<interpreter>\n1316\n</interpreter>" in sample.response
        response = sample.tokens[-sample.response_length :]
        trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
        assert tokenizer.decode(trained) == "".join(turns)
        assert len(sample.rollout_log_probs) == sample.response_length
        assert sample.non_generation_time > 0
    assert {"</code>", "</tool_call>"} <= set(speaker.asked[0]["sampling_params"]["stop"])


async def test_files_stay_for_the_next_piece_of_code_and_nothing_else_does(
    sandboxed, engine, retool_args, make_source, tokenizer
):
    args = retool_args()
    Speaker(
        engine,
        tokenizer,
        [
            "<code>open('x', 'w').write('kept'); y = 1</code>",
            "<code>print(open('x').read(), 'y' in globals())</code>",
            "Answer: \\boxed{a0}<|im_end|>",
        ],
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    assert "kept False" in output.samples[0][0].response


@pytest.mark.parametrize(
    ("turns", "settings", "rounds", "calls", "score"),
    [
        (["<code>print(1)</code>"], {"retool_max_turns": 3}, 3, 2, -1.0),
        (["I do not know<|im_end|>"], {"retool_max_turns": 2}, 2, 0, -1.0),
        (["<code>print('x' * 3000)</code>"], {}, 1, 1, -1.0),
        (["<code>while True: pass</code>", "Answer: \\boxed{a0}"], {"retool_tool_seconds": 0.5}, 2, 1, 1.0),
        (["<code>import os; os._exit(3)</code>", "Answer: \\boxed{no}"], {}, 2, 1, -1.0),
    ],
)
async def test_turns_tokens_and_seconds_are_bounded(
    sandboxed, engine, retool_args, make_source, tokenizer, turns, settings, rounds, calls, score
):
    args = retool_args(**settings)
    Speaker(engine, tokenizer, turns)
    output = await generate_rollout_async(args, 0, make_source(args))
    for sample in output.samples[0]:
        assert (sample.metadata["round_number"], sample.metadata["tool_calls"]) == (rounds, calls)
        assert sample.reward["score"] == pytest.approx(score, abs=0.11)
        assert sample.response_length <= 600
        ended = has_answer(turns[-1])
        assert sample.status == (Sample.Status.COMPLETED if ended else Sample.Status.TRUNCATED)


async def test_a_machine_without_a_sandbox_is_refused_before_any_code_runs(
    engine, retool_args, make_source, tokenizer, monkeypatch, tmp_path
):
    real = LocalSandbox.__init__
    monkeypatch.setattr(
        LocalSandbox, "__init__", lambda self, **options: real(self, **options, namespaces=False)
    )
    args = retool_args()
    marker = tmp_path / "ran"
    Speaker(engine, tokenizer, [f"<code>open('{marker}', 'w')</code>"])
    with pytest.raises(RolloutError, match=r"cannot hold files, processes.*allow_weaker"):
        await generate_rollout_async(args, 0, make_source(args))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("response", "calls", "score"),
    [
        ("Answer: \\boxed{6}", 0, 1.0),
        ("Answer: \\boxed{5}", 0, -1.1),
        ("Answer: \\boxed{5}", 4, -0.9),
        ("Answer: \\boxed{5}", 100, -0.6),
        ("no box", 2, -1.0),
    ],
)
async def test_the_reward_is_of_the_box_and_a_little_of_the_calls(response, calls, score):
    sample = Sample(response=response, label="6", metadata={"tool_calls": calls})
    assert (await reward(None, sample))["score"] == pytest.approx(score)
