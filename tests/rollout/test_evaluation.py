import json
from dataclasses import dataclass, field

import pytest

from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput
from slime.rollout.evaluation import eval_rollout
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.data import Dataset
from slime.utils.types import Sample
from tests.rollout import plugins

PROMPTS = {"prompt_key": "prompt", "apply_chat_template": True}


@dataclass
class EvalSet:
    """The fields of an eval set that the rollout room reads."""

    name: str
    path: str
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = 16
    stop: list | None = None
    stop_token_ids: list | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    input_key: str = "prompt"
    label_key: str = "label"
    tool_key: str | None = None
    metadata_key: str = "metadata"
    apply_chat_template: bool = True
    apply_chat_template_kwargs: dict | None = None
    rm_type: str | None = None
    custom_rm_path: str | None = "tests.rollout.plugins.label_rm"
    custom_generate_function_path: str | None = None
    metadata_overrides: dict = field(default_factory=dict)

    @property
    def cache_key(self):
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata):
        return metadata | {"rm_type": self.rm_type} | self.metadata_overrides


@pytest.fixture
def make_set(tmp_path):
    def make(name, count, **settings):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "label": f"a{i}"} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return EvalSet(name, str(path), **settings)

    return make


async def test_every_prompt_of_every_set_is_answered_in_order(engine, make_args, make_set):
    engine.answer = lambda conversation: "a1"
    sets = [make_set("one", 3, n_samples_per_eval_prompt=2), make_set("two", 1, max_response_len=1)]
    output = await eval_rollout(make_args(eval_datasets=sets), 5)
    assert output.data["one"]["rewards"] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert [(s.group_index, s.index) for s in output.data["one"]["samples"]] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 5),
    ]
    assert output.data["one"]["truncated"] == [False] * 6
    assert output.data["two"]["truncated"] == [True]


async def test_a_set_has_its_own_sampling_and_training_fills_the_rest(engine, make_args, make_set):
    config = make_set("one", 1, top_k=5, min_new_tokens=2, repetition_penalty=1.1)
    args = make_args(eval_datasets=[config], rollout_stop=["END"], rollout_top_p=1.0)
    await eval_rollout(args, 0)
    params = engine.seen("generate")[0]["sampling_params"]
    assert (params["temperature"], params["top_k"], params["max_new_tokens"]) == (0.0, 5, 16)
    assert (params["min_new_tokens"], params["repetition_penalty"]) == (2, 1.1)
    assert (params["top_p"], params["stop"]) == (1.0, ["END"])


async def test_prompt_and_response_stay_within_the_context_of_evaluations(engine, make_args, make_set):
    args = make_args(
        eval_datasets=[make_set("a", 1, max_response_len=99)],
        rollout_max_context_len=500,
        eval_max_context_len=20,
    )
    engine.answer = lambda conversation: "x" * 100
    (sample,) = (await eval_rollout(args, 0)).data["a"]["samples"]
    assert (len(sample.tokens), sample.status) == (20, Sample.Status.TRUNCATED)


async def test_a_set_may_bring_its_own_functions_and_metadata(engine, make_args, make_set):
    config = make_set(
        "one",
        1,
        custom_generate_function_path="tests.rollout.plugins.split_generate",
        metadata_overrides={"difficulty": "hard"},
    )
    args = make_args(eval_datasets=[config], custom_rm_path=None)
    output = await eval_rollout(args, 0)
    assert plugins.calls == [True]
    assert len(output.data["one"]["samples"]) == 2
    assert output.data["one"]["samples"][0].metadata["difficulty"] == "hard"


async def test_hooks_of_samples_are_told_of_the_rollout_and_that_it_evaluates(engine, make_args, make_set):
    args = make_args(
        eval_datasets=[make_set("one", 2)], rollout_sample_hook_path=["tests.rollout.plugins.cut_hook"]
    )
    output = await eval_rollout(args, 6)
    assert [sample.metadata["hooked"] for sample in output.data["one"]["samples"]] == [(6, True)] * 2


async def test_repeated_evaluation_starts_from_fresh_samples(engine, make_args, make_set):
    args = make_args(eval_datasets=[make_set("one", 2)])
    first = await eval_rollout(args, 0)
    second = await eval_rollout(args, 1)
    assert len(engine.seen("generate")) == 4
    assert [s.response_length for s in second.data["one"]["samples"]] == [
        s.response_length for s in first.data["one"]["samples"]
    ]


async def test_the_eval_reward_key_picks_the_number(engine, make_args, make_set, monkeypatch):
    async def rm(args, sample, **kwargs):
        return {"acc": 0.25}

    monkeypatch.setattr(plugins, "dict_rm", rm, raising=False)
    config = make_set("one", 1, custom_rm_path="tests.rollout.plugins.dict_rm")
    args = make_args(eval_datasets=[config], reward_key="other", eval_reward_key="acc")
    assert (await eval_rollout(args, 0)).data["one"]["rewards"] == [0.25]
    args.eval_reward_key = None
    with pytest.raises(RolloutError, match="--reward-key other: eval sample 0 has reward"):
        await eval_rollout(args, 0)
    # A set that is scored by a function of its own needs no key.
    config.custom_rm_path = "tests.rollout.plugins.length_rm"
    assert (await eval_rollout(args, 0)).data["one"]["rewards"][0] > 0


async def test_failures_and_deadlines_are_named(engine, make_args, make_set):
    config = make_set("one", 4, custom_generate_function_path="tests.rollout.plugins.failing_generate")
    with pytest.raises(RolloutError, match=r"failing_generate failed on sample 3 of group 3: LookupError"):
        await eval_rollout(make_args(eval_datasets=[config]), 0)
    config.custom_generate_function_path = "tests.rollout.plugins.hanging_generate"
    with pytest.raises(RolloutError, match=r"evaluation of one at rollout 2 did not finish within 0.1 s"):
        await eval_rollout(make_args(eval_datasets=[config], rollout_timeout=0.1), 2)
    with pytest.raises(RolloutError, match="--group-rm"):
        await eval_rollout(make_args(group_rm=True), 0)


def test_the_rollout_function_evaluates_and_generates_from_synchronous_code(
    engine, make_args, make_set, make_source
):
    args = make_args(eval_datasets=[make_set("one", 2)])
    output = generate_rollout(args, 0, make_source(args), evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    train = generate_rollout(args, 0, make_source(args))
    assert {s.status for group in train.samples for s in group} == {Sample.Status.COMPLETED}


async def test_prompts_that_are_too_long_are_counted_by_set(engine, make_args, make_set, caplog):
    config = make_set("long", 11)  # q10 has one character more than the others
    length = len(engine.tokenizer(Dataset(config.path, engine.tokenizer, **PROMPTS)[0].prompt)["input_ids"])
    args = make_args(eval_datasets=[config, make_set("other", 1)], eval_max_prompt_len=length)
    for _ in range(2):
        output = await eval_rollout(args, 0)
        assert output.metrics == {"eval/long/prompts_too_long": 1}
        assert len(output.data["long"]["rewards"]) == 10
    line = f"1 of 11 prompts are longer than --eval-max-prompt-len {length} and left out"
    assert caplog.messages.count(f"eval dataset long: {line}") == 1


async def test_samples_that_were_given_up_are_counted_by_set(engine, make_args, make_set):
    path = "tests.rollout.plugins."
    some = make_set("some", 5, custom_generate_function_path=path + "giving_up_generate")  # sample 3
    output = await eval_rollout(make_args(eval_datasets=[some, make_set("other", 1)]), 0)
    assert output.metrics == {"eval/some/given_up": 1}
    assert len(output.data["some"]["rewards"]) == 4
    assert [sample.index for sample in output.data["some"]["given_up"]] == [3]
    none = make_set("none", 2, custom_generate_function_path=path + "always_aborted")
    with pytest.raises(RolloutError, match="eval set none: every sample was aborted"):
        await eval_rollout(make_args(eval_datasets=[none]), 0)


async def test_a_set_has_its_own_arguments_of_the_template(engine, make_args, make_set):
    config = make_set("one", 1, apply_chat_template_kwargs={"chat_template": "{{ messages[0]['content'] }}!"})
    await eval_rollout(make_args(eval_datasets=[config, make_set("two", 1)]), 0)
    prompts = {engine.tokenizer.decode(body["input_ids"]) for body in engine.seen("generate")}
    assert prompts == {"q0!", "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"}
