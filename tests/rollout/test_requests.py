"""What a request to an engine says of a sample, and which group is given up."""

import asyncio

import pytest

from slime.rollout.attempts import is_finished, was_finished
from slime.rollout.base_types import RolloutError
from slime.rollout.generation import (
    generate_and_rm,
    generate_and_rm_group,
    is_given_up,
    made_before,
    prepare_request,
    read_output_tokens,
    routing_headers,
)
from slime.rollout.rm_hub.math_grader import equal_at_sight
from slime.rollout.text_generation import remembers_tokens
from slime.utils.http_utils import init_http_client
from slime.utils.types import Sample
from tests.rollout import plugins
from tests.run_args import config_with

ABORTED, COMPLETED = Sample.Status.ABORTED, Sample.Status.COMPLETED
CHATS = "v1/chat/completions"
RADIX_TREE = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"


@pytest.mark.parametrize(
    ("status", "reward", "given_up"), [(ABORTED, None, True), (ABORTED, 0.0, False), (COMPLETED, None, False)]
)
def test_a_group_is_given_up_with_one_sample_that_has_no_reward(status, reward, given_up):
    whole, other = Sample(status=COMPLETED, reward=1.0), Sample(status=status, reward=reward)
    assert is_given_up([whole, other]) is is_given_up([[whole, other], whole]) is given_up


@pytest.mark.parametrize(
    ("status", "reward", "is_there"),
    [(COMPLETED, 0.0, True), (COMPLETED, None, False), (ABORTED, 0.0, False), (ABORTED, None, False)],
)
def test_a_group_is_finished_with_answer_and_reward_of_each_sample(status, reward, is_there):
    begun = {"start_rollout_id": 0}
    whole, other = (
        Sample(status=of, reward=given, metadata=dict(begun))
        for of, given in ((COMPLETED, 1.0), (status, reward))
    )
    for group in ([whole, other], [[whole, other], whole]):
        assert is_finished(group) is was_finished(group) is is_there
    other.metadata.clear()
    assert not was_finished([whole, other])


@pytest.mark.parametrize(
    ("limits", "evaluation", "tokens"),
    [
        ({}, False, 6),
        ({"rollout_max_context_len": 9}, False, 4),
        ({"rollout_max_context_len": 9}, True, 6),
        ({"rollout_max_context_len": 9, "eval_max_context_len": 7}, True, 2),
        ({"rollout_max_context_len": 6}, False, 1),
        ({"rollout_max_context_len": 5}, False, None),
        ({"rollout_max_context_len": 4}, False, None),
    ],
)
def test_what_is_left_of_a_response_is_asked_for(limits, evaluation, tokens):
    """Of 8 tokens 2 are there, and a prompt of 3."""
    sample = Sample(tokens=[1, 2, 3, 4, 5], response_length=2, status=ABORTED)
    given = {"max_new_tokens": 8, "stop": None, "top_p": 1.0}
    request = prepare_request(config_with(**limits), sample, given, evaluation)
    assert given == {"max_new_tokens": 8, "stop": None, "top_p": 1.0}
    if tokens is None:
        assert request is None and sample.status is Sample.Status.TRUNCATED
        return
    assert request["sampling_params"] == {"max_new_tokens": tokens, "top_p": 1.0}
    assert (request["input_ids"], request["return_logprob"]) == ([1, 2, 3, 4, 5], True)
    assert sample.status is ABORTED


def test_a_sample_that_is_finished_is_not_asked_for():
    with pytest.raises(ValueError, match="status is completed, expected pending or aborted"):
        prepare_request(config_with(), Sample(status=COMPLETED), {"max_new_tokens": 8}, False)


def test_answers_without_tokens_are_empty():
    assert read_output_tokens({"meta_info": {}}) == ([], [])
    triples = [(-0.5, 7, None), (-1.0, 8, None)]
    assert read_output_tokens({"meta_info": {"output_token_logprobs": triples}}) == ([7, 8], [-0.5, -1.0])


@pytest.mark.parametrize(
    ("policy", "session", "headers"),
    [
        ("consistent_hashing", "s", {"X-SMG-Routing-Key": "s"}),
        ("consistent_hashing", None, None),
        ("round_robin", "s", None),
    ],
)
def test_sessions_are_told_to_routers_that_ask(policy, session, headers):
    config = config_with(router_policy=policy).router
    assert routing_headers(config, Sample(session_id=session)) == headers


@pytest.mark.parametrize(
    ("is_used", "paths", "remembers"),
    [(True, [RADIX_TREE], True), (False, [RADIX_TREE], False), (True, ["a.b"], False), (True, [], False)],
)
def test_texts_are_enough_where_the_router_knows_their_tokens(is_used, paths, remembers):
    config = config_with(use_slime_router=is_used, slime_router_middleware_paths=paths)
    assert remembers_tokens(config.slime_router) is remembers


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("x+1", "x+1", True),
        ("12", "12", True),
        ("12", "21", False),
        ("0", "-7", False),
        ("12", "12.0", None),
        ("1/2", "12", None),
        ("007", "7", None),
        ("-0", "0", None),
        ("1" * 15, "1" * 14, False),
        ("1" * 16, "1" * 15, None),
    ],
)
def test_integers_and_equal_texts_are_judged_at_sight(gold, answer, verdict):
    assert equal_at_sight(gold, answer) is verdict


def test_an_answer_goes_on_with_what_engines_made_and_not_with_what_a_tool_said():
    """No stop string may be found that a tool has begun."""
    sample = Sample(tokens=[1, 2])
    assert made_before(sample) == []
    for version, *tokens in (("1", 3, 4), (None, 5), ("1", 6), ("2", 7, 8)):
        meta = {"weight_version": version} if version else None
        logged = [0.0] * len(tokens) if version else None
        sample.append_response_tokens(
            tokens=tokens, log_probs=logged, trainable=version is not None, meta_info=meta
        )
    assert made_before(sample) == [6, 7, 8]
    sample.append_response_tokens(tokens=[9], trainable=False)
    assert made_before(sample) == []
    sample.version_spans = []
    sample.weight_versions = []
    assert made_before(sample) == [3, 4, 5, 6, 7, 8, 9], "engines that tell no versions"


async def test_each_sample_is_asked_of_the_adapter_that_its_metadata_name(engine, make_args):
    """Also by a function of the user's that knows nothing of adapters; at once with the others."""
    args = make_args(lora_rank=8, lora_merge=False, lora_adapters=["a", "b"], lora_adapter_key="task")
    init_http_client(args, adapters=["a", "b"])
    engine.answers[CHATS] = {"text": "yes"}
    params = {"max_new_tokens": 4}

    def sample(number, path=None, **metadata):
        return Sample(index=number, prompt=f"q{number}", metadata=metadata, generate_function_path=path)

    own = "tests.rollout.plugins.chatting_generate"
    asked = [sample(0, task="a"), sample(1, task="b"), sample(2, own, task="a"), sample(3, own, task="b")]
    await asyncio.gather(*(generate_and_rm(args, one, params) for one in asked))
    (plain, chats) = (sorted(body["lora_path"] for body in engine.seen(path)) for path in ("generate", CHATS))
    assert plain == chats == ["a", "b"]
    for wrong, found in ((sample(4), "no task"), (sample(5, task="c"), "task 'c'")):
        with pytest.raises(RolloutError, match=f"sample . of .*: its metadata have {found} .wanted: one of"):
            await generate_and_rm(args, wrong, params)


@pytest.mark.parametrize("as_one", [False, True])
async def test_rewards_and_hooks_ask_the_adapter_of_the_samples_too(engine, make_args, as_one):
    """And where a group is of several, that is not guessed."""
    args = make_args(
        **dict(lora_rank=8, lora_merge=False, lora_adapters=["a", "b"], lora_adapter_key="task"),
        **dict(custom_rm_path="tests.rollout.plugins.asking_rm", group_rm=as_one),
        rollout_sample_hook_path=["tests.rollout.plugins.asking_hook"],
    )
    init_http_client(args, adapters=["a", "b"])
    engine.answers[CHATS] = {"text": "well"}
    plugins.calls.clear()

    def asked(*tasks):
        group = [Sample(index=i, prompt=task, metadata={"task": task}) for i, task in enumerate(tasks)]
        return generate_and_rm_group(args, group, {"max_new_tokens": 4})

    groups = await asyncio.gather(asked("a", "a"), asked("b", "b"))
    assert all(sample.reward == 1.0 for group in groups for sample in group)
    per_group = 1 if as_one else 2
    assert sorted(body["lora_path"] for body in engine.seen(CHATS)) == ["a"] * per_group + ["b"] * per_group
    assert sorted(plugins.calls) == ["a", "a", "b", "b"]
    if as_one:
        with pytest.raises(RolloutError, match=r"UnnamedAdapter: .* names none of the adapters a, b"):
            await asked("a", "b")
