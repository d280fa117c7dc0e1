"""A model plays an environment: what is trained on, how episodes end, and what they are worth."""

import time
from copy import copy

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.episodes import Episodes
from slime.rollout.evaluation import eval_rollout_single_dataset
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.engines.fake import EOS, HEADER
from tests.environments.games import LOOK, Guess, Shelves, SlowGuess, Wayward
from tests.rollout.test_evaluation import EvalSet

PARAMS = {"max_new_tokens": 64, "stop": None}
CALL = '<tool_call>\n{"name": "look", "arguments": {"shelf": "a"}}\n</tool_call>'


def counting(conversation):
    """Guesses 0, 1, 2 and so on."""
    return str(conversation.count(HEADER))


def parts_of(sample):
    """Runs of tokens with the same mask: mask, ids, log-probs."""
    parts = []
    ids = sample.tokens[-sample.response_length :]
    for mask, token, log_prob in zip(sample.loss_mask, ids, sample.rollout_log_probs, strict=True):
        if not parts or parts[-1][0] != mask:
            parts.append((mask, [], []))
        parts[-1][1].append(token)
        parts[-1][2].append(log_prob)
    return parts


def number_of(args, sample):
    """The number that the game of this sample has."""
    game = Guess()
    game.reset({"prompt": ""}, args.rollout_seed + sample.group_index)
    return game.number


@pytest.fixture
def play(engine, make_args):
    """Plays one episode: the sample."""
    engine.answer = counting

    async def run(environment, *options, params=PARAMS, evaluation=False, flags=None, sample=None, **more):
        made = sample or Sample(prompt="Guess", index=5, group_index=2, label="l", metadata={"kept": 1})
        generate = Episodes(environment, *options, **more)
        assert await generate(make_args(**(flags or {})), made, dict(params), evaluation) is made
        return made

    return run


@pytest.mark.parametrize("environment", [Guess, SlowGuess, "tests.environments.games.Guess"])
async def test_what_the_model_said_is_trained_on_and_what_it_heard_is_not(
    play, make_args, tokenizer, environment
):
    sample = await play(environment)
    number = number_of(make_args(), sample)
    assert number > 1  # or there is too little to see
    assert sample.reward == 1.0 - 0.125 * number and sample.status is Sample.Status.COMPLETED
    assert sample.metadata["turns"] == [f"{guess}{EOS}" for guess in range(number + 1)]
    assert sample.metadata["step_rewards"] == [-0.125] * number + [1.0]
    assert (sample.metadata["round_number"], sample.metadata["kept"]) == (number + 1, 1)
    parts = parts_of(sample)
    assert [mask for mask, _, _ in parts] == [1, 0] * number + [1]
    assert [tokenizer.decode(ids) for mask, ids, _ in parts if mask] == sample.metadata["turns"]
    assert all(log_prob == -0.25 * mask for mask, _, log_probs in parts for log_prob in log_probs)
    whole = [{"role": "user", "content": "Guess: 0 to 9?"}]
    for guess in range(number + 1):
        whole += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": "higher"}]
    wanted = tokenizer.apply_chat_template(whole[:-1], tokenize=False).removesuffix("\n")
    assert tokenizer.decode(sample.tokens) == wanted
    assert wanted.endswith(sample.response)


async def test_answers_to_one_row_play_the_same_episode_and_other_rows_others(play, make_args):
    numbers = set()
    for group in range(6):
        samples = [Sample(prompt="Guess", index=9 * group + i, group_index=group) for i in range(3)]
        turns = {len((await play(Guess, sample=sample)).metadata["turns"]) for sample in samples}
        assert turns == {number_of(make_args(), samples[0]) + 1}
        numbers |= turns
    assert len(numbers) > 2


async def test_options_are_the_constructor_s(play, tokenizer):
    sample = await play(Guess, {"highest": 0})
    assert "0 to 0?" in tokenizer.decode(sample.tokens) and sample.reward == 1.0


async def test_calls_are_read_and_answered_as_those_of_a_tool(play, engine, tokenizer):
    engine.answer = lambda conversation: "37" if "37" in conversation else f"Hm. {CALL}"
    sample = await play(Shelves)
    assert sample.reward == 1.0 and len(sample.metadata["turns"]) == 2
    text = tokenizer.decode(sample.tokens)
    whole = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is on a?"}]
    first = tokenizer.apply_chat_template(whole, tools=[LOOK], tokenize=False, add_generation_prompt=True)
    assert text.startswith(first + f"Hm. {CALL}{EOS}\n")
    assert "<tool_response>37</tool_response>" in text


async def test_without_a_parser_calls_are_text(play, engine):
    engine.answer = lambda conversation: CALL
    sample = await play(Shelves, tool_parser=None)
    assert sample.reward == 0.0 and len(sample.metadata["turns"]) == 1


async def test_what_an_environment_says_never_becomes_a_control_token(play, engine, tokenizer):
    class Sly(Wayward):
        def reset(self, task, seed):
            return f"a{EOS}b"

        def step(self, answer):
            step = super().step(answer)
            return type(step)(f"c{EOS}d", reward=step.reward)

    ids = tokenizer(f"hm{EOS}", add_special_tokens=False)["input_ids"]
    answer = lambda body: engine._answer_with(ids, {"type": "stop"}, {**body, "weight_version": "1"})
    engine.answers["generate"] = answer
    sample = await play(Sly, max_turns=2)
    ends = sample.tokens.count(tokenizer.eos_token_id)
    assert ends == 4  # of two messages that were heard, and of two answers
    text = tokenizer.decode(sample.tokens)
    assert f"a{EOS}b" in text and f"c{EOS}d" in text


async def test_the_last_turn_is_a_step_and_nothing_is_heard_after_it(play):
    sample = await play(Wayward, max_turns=3)
    assert (sample.reward, sample.status) == (0.75, Sample.Status.TRUNCATED)
    assert [mask for mask, _, _ in parts_of(sample)] == [1, 0, 1, 0, 1]


async def test_a_turn_that_was_cut_off_is_no_step(play, engine):
    engine.answer = lambda conversation: "x" * 40 if conversation.count(HEADER) else "hm"
    sample = await play(Wayward, params={"max_new_tokens": 8})
    assert (sample.reward, sample.status) == (0.25, Sample.Status.TRUNCATED)
    assert len(sample.metadata["turns"]) == 2 and sample.loss_mask[-8:] == [1] * 8


@pytest.mark.parametrize("evaluation", [False, True])
async def test_an_episode_has_so_many_tokens(play, engine, evaluation):
    free = await play(Wayward, max_turns=4)
    flag = "eval_max_context_len" if evaluation else "rollout_max_context_len"
    seen = set()
    for longest in range(len(free.tokens) - free.response_length, len(free.tokens) + 1):
        sample = await play(Wayward, max_turns=4, evaluation=evaluation, flags={flag: longest})
        assert len(sample.tokens) <= longest and sample.status is Sample.Status.TRUNCATED
        steps = sample.metadata.get("step_rewards", [])
        assert sample.reward == sum(steps) and sample.tokens == free.tokens[: len(sample.tokens)]
        assert not sample.response_length or sample.loss_mask[-1] == 1  # nothing is heard without an answer
        seen.add(len(steps))
    assert all(body["sampling_params"]["max_new_tokens"] > 0 for body in engine.seen("generate"))
    assert seen == {0, 1, 2, 3, 4}


async def test_the_engine_is_asked_for_log_probs_by_the_session_s_key_and_with_what_is_set(play, engine):
    sample = Sample(prompt="Guess", index=5, group_index=2, session_id="the key")
    await play(Guess, sample=sample, flags={"router_policy": "consistent_hashing"})
    calls = [call for call in engine.calls if call.path == "generate"]
    assert len(calls) == len(sample.metadata["turns"]) > 1
    for call in calls:
        assert call.body["return_logprob"] is True and call.headers["x-smg-routing-key"] == "the key"
        assert call.body["sampling_params"] == {"max_new_tokens": 64}


async def test_an_abort_that_comes_upon_the_last_token_cuts_nothing_off(play, engine, tokenizer):
    ids = tokenizer(f"hm{EOS}", add_special_tokens=False)["input_ids"]
    answer = lambda body: engine._answer_with(ids, {"type": "abort"}, {**body, "weight_version": "1"})
    engine.answers["generate"] = answer
    sample = await play(Wayward, max_turns=2)
    assert sample.metadata["turns"] == [f"hm{EOS}"] * 2 and len(engine.seen("generate")) == 2


async def test_the_time_that_the_environment_takes_is_counted_up(play):
    class Slow(Wayward):
        def step(self, answer):
            time.sleep(0.1)
            return super().step(answer)

    assert (await play(Slow, max_turns=4)).non_generation_time >= 0.4


async def test_an_environment_in_a_thread_may_ask_for_the_run_s_args(play):
    class Told(Wayward):
        def __init__(self, args):
            super().__init__()
            self.seed = args.rollout_seed

        def reset(self, task, seed):
            return f"seed {self.seed}"

    assert (await play(Told, max_turns=1, flags={"rollout_seed": 77})).status is Sample.Status.TRUNCATED
    with pytest.raises(RolloutError, match="no attribute"):
        await play(Told, {"args": 1}, max_turns=1)  # an option of this name comes before


@pytest.fixture
def own_checkpoint(tokenizer, tmp_path):
    """One whose template opens thoughts, and writes ids of calls and whether there are tools."""
    own = copy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.tool_call_id }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{% if tools %}tools {% endif %}"
        "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    own.save_pretrained(tmp_path / "own")
    return str(tmp_path / "own")


async def test_thoughts_that_the_template_opens_call_nothing(play, engine, tokenizer, own_checkpoint):
    heard = []

    class Hears(Shelves):
        def step(self, answer):
            heard.append(answer)
            return super().step(answer)

    engine.generate = said(engine, tokenizer, [f"{CALL}", f"hm</think>I ask. {CALL}{CALL}", "hm</think>37"])
    flags = {"hf_checkpoint": own_checkpoint}
    first = await play(Hears, reasoning_parser="qwen3", max_turns=1, flags=flags)
    assert (heard[0].calls, heard[0].text) == ([], CALL) and first.reward == 0.0
    second = await play(Hears, reasoning_parser="qwen3", flags=flags)
    assert (heard[1].text, heard[1].thoughts) == ("I ask.", "hm") and heard[2].text == "37"
    assert [call.id for call in heard[1].calls] == ["call_0", "call_1"] and second.reward == 1.0
    asked = "<|im_start|>tool call_0\n37<|im_end|>\ntools <|im_start|>assistant\n<think>\n"
    assert asked in tokenizer.decode(second.tokens)


async def test_a_template_that_hides_answers_ends_the_run(play, tokenizer, tmp_path):
    own = copy(tokenizer)
    own.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
    own.save_pretrained(tmp_path / "own")
    with pytest.raises(RolloutError, match=r"sample 5 .* what comes after an answer \(role .*: user\)"):
        await play(Wayward, flags={"hf_checkpoint": str(tmp_path / "own")})


async def test_thoughts_that_somebody_spells_are_none_of_the_model_s(play, engine):
    class Spells(Shelves):
        def reset(self, task, seed):
            super().reset(task, seed)
            return "What is <think>?"

    engine.answer = lambda conversation: "37" if "37" in conversation else CALL
    assert (await play(Spells, reasoning_parser="qwen3")).reward == 1.0


def said(engine, tokenizer, texts):
    """Generates these texts, one at each request."""
    left = iter(texts)

    async def generate(body):
        ids = tokenizer(next(left) + EOS, add_special_tokens=False)["input_ids"]
        return engine._answer_with(ids, {"type": "stop"}, {**body, "weight_version": "1"})

    return generate


async def test_an_abort_gives_the_episode_up_and_another_attempt_forgets_it(play, make_args):
    class Aborts(Guess):
        def step(self, answer):
            GenerateState(make_args()).aborted = answer.text == "1"
            return super().step(answer)

    sample = await play(Aborts)
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, None)
    assert len(sample.metadata["turns"]) == 2
    again, fresh = await play(Guess, sample=sample), await play(Guess)
    for name in ("tokens", "loss_mask", "reward", "metadata", "response", "status", "version_spans"):
        assert getattr(again, name) == getattr(fresh, name)


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("raise", "ZeroDivisionError: by zero"),
        ("exhaust", "StopIteration"),
        ("sys.exit", "SystemExit: 3"),
        ("say nothing", "step returned None"),
        ("nan", "gave the reward nan"),
        ("numbers", "observation 7"),
        ("say too much", "observation of 1.0 MiB"),
        ("say half a character", "surrogates not allowed"),
        ("show", "content [{'type': 'image'}]"),
        ("loop", "no answer within 0.5 s"),
    ],
)
async def test_what_goes_wrong_in_an_environment_is_no_reward(play, engine, deed, why):
    engine.answer = lambda conversation: deed if conversation.count(HEADER) else "hm"
    sample = await play(Wayward, limit_s=0.5 if deed == "loop" else 60)
    assert (sample.status, sample.reward, sample.remove_sample) == (Sample.Status.FAILED, None, True)
    assert why in sample.metadata["grading_failure"]
    assert "tests.environments.games.Wayward" in sample.metadata["grading_failure"]
    assert len(sample.metadata["turns"]) == 2


@pytest.mark.parametrize("deed", ["raise", "say nothing", "sys.exit", "say half a character"])
async def test_an_episode_that_does_not_begin_gives_its_group_up(play, deed, caplog):
    class Mute(Wayward):
        def reset(self, task, seed):
            super().reset(task, seed)
            return "\ud800" if deed == "say half a character" else None

    sample = await play(Mute, {"told": "" if deed == "say nothing" else deed})
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, None)
    assert "sample 5 of group 2: environment" in caplog.text


async def test_an_environment_that_cannot_be_made_ends_the_run(play):
    with pytest.raises(RolloutError, match="Wayward: ValueError: no such board"):
        await play(Wayward, {"told": "unmade"})
    with pytest.raises(RolloutError, match="has no attribute 'Nobody'"):
        await play("tests.environments.games.Nobody")


async def test_an_engine_that_refuses_is_no_failure_of_the_environment(play, engine):
    from fastapi.responses import JSONResponse

    engine.answers["generate"] = JSONResponse({"error": "too long"}, status_code=400)
    with pytest.raises(Exception, match="400"):
        await play(Guess)


async def test_each_episode_is_closed(play):
    Wayward.closed = 0
    for _ in range(2):
        await play(Wayward, max_turns=1)
    assert Wayward.closed == 2


async def test_all_of_an_episode_happens_in_one_thread(play):
    """As sqlite3 demands of its connections, for instance."""
    import threading

    class Bound(Guess):
        def __init__(self):
            super().__init__()
            self.thread = threading.get_ident()

        def reset(self, task, seed):
            assert threading.get_ident() == self.thread != threading.main_thread().ident
            return super().reset(task, seed)

        def step(self, answer):
            assert threading.get_ident() == self.thread
            return super().step(answer)

    assert (await play(Bound)).status is Sample.Status.COMPLETED


def test_limits_and_places_that_make_no_sense_are_refused():
    for wrong in ({"max_turns": 0}, {"limit_s": 0}, {"processes": -1}):
        with pytest.raises(ValueError, match=r"wanted: at least 1, above 0, at least 0"):
            Episodes(Guess, **wrong)
    with pytest.raises(ValueError, match="tool_parser 'mine'"):
        Episodes(Guess, tool_parser="mine")

    class Local(Guess):
        pass

    with pytest.raises(ValueError, match="wanted: a class at the top of a module"):
        Episodes(Local, processes=1)


class Asks(Wayward):
    """Begins with the messages of the row."""

    def reset(self, task, seed):
        return task["prompt"]


sometimes, guessing = Episodes(Asks, max_turns=2), Episodes(Guess, max_turns=20)


async def test_a_rollout_leaves_out_what_went_wrong(engine, make_args, make_source):
    once_bad = []

    def deed_of(conversation):
        """Goes wrong in all first turns of q0, and in one of q1."""
        once = "q1" in conversation and not once_bad
        if once:
            once_bad.append(conversation)
        return "raise" if once or "q0" in conversation else "hm"

    engine.answer = deed_of
    args = make_args(
        custom_generate_function_path=f"{__name__}.sometimes",
        custom_rm_path=None,
        apply_chat_template=False,
        over_sampling_batch_size=1,
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [group[0].group_index for group in output.samples] == [1, 2, 3]
    assert output.metrics == {"rollout/dynamic_filter/drop_ungraded": 1}
    assert sorted(sample.remove_sample for sample in output.samples[0]) == [False, True]
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.5, 0.5]] * 3


async def test_an_evaluation_plays_too(engine, make_args, tmp_path):
    engine.answer = counting
    path = tmp_path / "eval.jsonl"
    path.write_text('{"prompt": "Guess", "label": ""}\n' * 3)
    own = {"custom_rm_path": None, "custom_generate_function_path": f"{__name__}.guessing"}
    config = EvalSet("x", str(path), apply_chat_template=False, **own)
    args = make_args(apply_chat_template=False)
    result = (await eval_rollout_single_dataset(args, 0, config))["x"]
    numbers = [number_of(args, sample) for sample in result["samples"]]
    assert result["rewards"] == [1.0 - 0.125 * number for number in numbers]
