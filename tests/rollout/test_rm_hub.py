import asyncio
import functools
import threading
import time

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from slime.config.run import run_config
from slime.rollout.base_types import GradingFailed, RolloutError
from slime.rollout.checks import check_reward
from slime.rollout.rm_hub import async_rm, batched_async_rm, f1_score, grouped_async_rm, remote
from slime.utils.types import Sample
from tests.rollout import plugins

PLUGINS = "tests.rollout.plugins."


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("math", "so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("math", "so \\boxed{4}", "5", 0.0),
        ("math", "so 5", "5", 0.0),
        ("math", "\\boxed{1} no, \\boxed{\\frac{1}{3}}", "$\\boxed{\\frac{1}{3}}$", 1.0),
        ("deepscaler", "<think>\\boxed{1}</think> \\boxed{2}", "2", 1.0),
        ("deepscaler", "\\boxed{2}", "2", 0.0),
        ("math_compat", "so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("math_compat", "so \\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 0.0),
        ("math_compat", "so 5", "5", 0.0),
        ("deepscaler_compat", "<think>\\boxed{1}</think> \\boxed{2}", "\\boxed{2}", 1.0),
        ("deepscaler_compat", "###Response \\boxed{2}", "2", 1.0),
        ("deepscaler_compat", "\\boxed{2}", "2", 0.0),
        ("f1", "The cat sat", "a cat sat", 1.0),
        ("f1", "yes", "no", 0.0),
        ("boxed_f1", "dog \\boxed{cat}", "cat", 1.0),
        ("gpqa", "The answer is (C).", "C", 1.0),
        ("gpqa", "I think it is B", "C", 0.0),
    ],
)
async def test_named_types(make_args, rm_type, response, label, reward):
    args = make_args(custom_rm_path=None, rm_type=rm_type)
    assert await async_rm(args, Sample(response=response, label=label)) == reward


async def test_dapo_gives_a_score_and_a_verdict(make_args):
    args = make_args(custom_rm_path=None, rm_type="dapo")
    right = await async_rm(args, Sample(response="hence\nAnswer: $1,000$", label="1000"))
    assert right == {"score": 1.0, "acc": True, "pred": "1000"}
    wrong = await async_rm(args, Sample(response="1000", label="1000"))
    assert (wrong["score"], wrong["acc"]) == (-1.0, False)


async def test_precedence_sample_path_then_flag_then_metadata(make_args):
    args = make_args(rm_type="math", custom_rm_path=None)
    sample = Sample(response="yes", label="yes", response_length=9, metadata={"rm_type": "f1"})
    assert await async_rm(args, sample) == 1.0
    args.custom_rm_path = PLUGINS + "length_rm"
    assert await async_rm(args, sample) == 9.0
    sample.custom_rm_path = PLUGINS + "label_rm"
    assert await async_rm(args, sample) == 1.0


async def test_a_plain_function_runs_off_the_event_loop(make_args):
    args = make_args(custom_rm_path=PLUGINS + "thread_rm")
    assert await async_rm(args, Sample()) == 1.0
    assert plugins.calls[0] != threading.current_thread().name


async def test_a_batch_gets_one_call_and_must_be_answered_in_full(make_args):
    args = make_args(custom_rm_path=PLUGINS + "group_rm")
    assert await batched_async_rm(args, [Sample(index=4), Sample(index=5)]) == [0.0, 1.0]
    assert plugins.calls == [[4, 5]]
    args.custom_rm_path = PLUGINS + "split_rm_short"
    plugins.split_rm_short = lambda args, samples: [1.0]
    with pytest.raises(RolloutError, match="expected 2 rewards"):
        await batched_async_rm(args, [Sample(), Sample()])


async def test_an_unknown_type_and_a_missing_label_are_errors(make_args):
    args = make_args(custom_rm_path=None, rm_type="maths")
    with pytest.raises(RolloutError, match="--rm-type maths: expected one of math, deepscaler"):
        await async_rm(args, Sample())
    args.rm_type = "math"
    with pytest.raises(RolloutError, match="no label"):
        await async_rm(args, Sample(response="\\boxed{1}"))
    args.use_opd = True  # a teacher teaches, whatever the reward
    assert await async_rm(args, Sample(response="\\boxed{1}")) == 0.0
    assert await async_rm(args, Sample(response="\\boxed{1}", label="1")) == 1.0


@pytest.mark.parametrize(
    ("prediction", "truth", "scores"),
    [
        (None, "cat", (0.0, 0.0, 0.0)),
        ("yes", "no", (0.0, 0.0, 0.0)),
        ("no way", "no", (0.0, 0.0, 0.0)),
        ("noanswer", "cat", (0.0, 0.0, 0.0)),
        ("dog", "cat", (0.0, 0.0, 0.0)),
        ("No!", "no", (1.0, 1.0, 1.0)),
        ("A big cat, sat.", "the CAT", (0.5, 1 / 3, 1.0)),
        ("cat", "big cat cat", (0.5, 1.0, 1 / 3)),
        ("7", 7, (1.0, 1.0, 1.0)),
    ],
)
def test_words_in_common_are_f1_precision_and_recall(prediction, truth, scores):
    assert f1_score(prediction, truth) == scores


async def test_a_remote_reward_needs_an_address(make_args):
    sample = Sample(prompt="p", response="r", metadata={"rm_type": "remote_rm"})
    with pytest.raises(RolloutError, match="--rm-url: not given"):
        await async_rm(make_args(custom_rm_path=None, rm_type="math", rm_url=None), sample)


@pytest.fixture
def judge(make_args):
    """``judge(statuses)``: args of a reward model that answers so, then with 0.75; and what it saw."""
    servers = []

    def serve(statuses):
        app, seen = FastAPI(), []

        @app.post("/")
        async def score(request: Request):
            seen.append(await request.json())
            return JSONResponse(0.75, status_code=(statuses[len(seen) - 1 :] or [200])[0])

        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        args = make_args(custom_rm_path=None, rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/")
        return args, seen

    yield serve
    for server, thread in servers:
        server.should_exit = True
        thread.join()


async def test_a_remote_reward_is_asked_again_after_an_error_that_may_pass(judge):
    judges = {status: judge([status]) for status in (500, 503, 408, 425, 429)}
    sample = Sample(prompt="p", response="r", label="l")
    # All at once: each waits for a second or two before it asks again.
    asked = [async_rm(args, sample) for args, _ in judges.values()]
    rewards = await asyncio.gather(*asked, return_exceptions=True)
    assert dict(zip(judges, rewards, strict=True)) == dict.fromkeys(judges, 0.75)
    payload = {"prompt": "p", "response": "r", "label": "l"}
    assert {status: seen for status, (_, seen) in judges.items()} == dict.fromkeys(judges, [payload] * 2)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_remote_reward_is_not_asked_again_if_the_request_is_wrong(judge, status):
    args, seen = judge([status])
    with pytest.raises(RolloutError, match=rf"failed on sample 7 of group 2: HTTPStatusError: .*{status}"):
        await async_rm(args, Sample(prompt="p", index=7, group_index=2))
    assert len(seen) == 1


async def test_a_remote_reward_is_asked_of_no_host_that_is_not_allowed(judge):
    args, seen = judge([307])
    args.allowed_hosts = ["judge"]  # as where user code has put another address in
    with pytest.raises(
        RolloutError, match=r"HostRefused: --rm-url: host 127\.0\.0\.1:\d+ is not in --allowed-"
    ):
        await async_rm(args, Sample(prompt="p"))
    assert seen == []
    args.allowed_hosts = ["127.0.0.1"]
    with pytest.raises(RolloutError, match="HTTP 307"):  # it may lead anywhere
        await async_rm(args, Sample(prompt="p"))
    assert len(seen) == 1


async def test_rewards_that_user_code_makes_numbers_of_may_be_anything(make_args):
    args = make_args(custom_rm_path=PLUGINS + "text_rm", custom_reward_post_process_path="a.b")
    assert await async_rm(args, Sample()) == "1.0"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0", [1.0], np.float32("nan"), 10**400])
@pytest.mark.parametrize("key", ["reward_key", "eval_reward_key"])
def test_only_finite_numbers_are_rewards(make_args, reward, key):
    sample = Sample(index=3, group_index=1)
    with pytest.raises(RolloutError, match=r"plugins\.length_rm returned .* for sample 3 of group 1"):
        check_reward(run_config(make_args()), "plugins.length_rm", sample, reward)
    with pytest.raises(RolloutError, match="expected a finite number"):
        given = {"score": reward, "why": "x"}
        check_reward(run_config(make_args(**{key: "score"})), "plugins.length_rm", sample, given)


@pytest.mark.parametrize("reward", [1, 0.5, True, np.float32(2), torch.tensor(3.0), {"why": "x"}])
def test_numbers_of_all_libraries_are_rewards(make_args, reward):
    check_reward(run_config(make_args(reward_key="score")), "plugins.length_rm", Sample(), reward)


async def test_the_error_of_a_remote_reward_holds_no_secret_of_its_address(make_args):
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403, text="not you")

    url = "http://user:K@judge/score?token=K"
    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(refuse))
    args = make_args(custom_rm_path=None, rm_type="remote_rm", rm_url=url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.httpx, "AsyncClient", client)
        with pytest.raises(httpx.HTTPStatusError) as error:
            await remote.remote_rm(args, Sample(prompt="p", response="r"), max_retries=1)
    assert str(error.value) == "--rm-url http://***@judge/score?***: HTTP 403: not you"


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([[1.0, 2.0], 3.0], [1.0, 2.0, 3.0]),  # a list for a sample that was split
        ([1.0, 3.0], [1.0, 1.0, 3.0]),  # one for all of it
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),  # one for each
        ([[1.0, 2.0, 4.0], 3.0], None),
        ([[1.0], 3.0], None),
        ([1.0], None),
        ([1.0, 2.0, 3.0, 4.0], None),
    ],
)
async def test_samples_of_a_group_that_were_split_get_a_reward_each(make_args, monkeypatch, rewards, found):
    monkeypatch.setattr(plugins, "told", rewards)
    args = make_args(custom_rm_path=PLUGINS + "told_rm", group_rm=True)
    group = [[Sample(index=0), Sample(index=1)], Sample(index=2)]
    if found is None:
        with pytest.raises(RolloutError, match="expected 2 rewards, a list or a number for each list"):
            await grouped_async_rm(args, group)
    else:
        assert await grouped_async_rm(args, group) == found


async def test_rewards_of_lists_are_looked_at_one_by_one(make_args, monkeypatch):
    args = make_args(custom_rm_path=PLUGINS + "told_rm", group_rm=True)
    monkeypatch.setattr(plugins, "told", [0.0, float("nan"), 1.0])
    one, two, three = Sample(index=6), Sample(index=7), Sample(index=8)
    for ask, group in ((batched_async_rm, [one, two, three]), (grouped_async_rm, [[one, two], three])):
        with pytest.raises(RolloutError, match="returned nan for sample 7"):
            await ask(args, group)


async def test_a_group_without_split_samples_is_graded_as_a_batch(make_args):
    args = make_args(custom_rm_path=PLUGINS + "group_rm", group_rm=True)
    assert await grouped_async_rm(args, [Sample(index=4), Sample(index=5)]) == [0.0, 1.0]
    assert plugins.calls == [[4, 5]]
    own = Sample(index=0, response="abc", custom_rm_path=PLUGINS + "length_rm")
    assert await grouped_async_rm(args, [[own, own], own]) == [await async_rm(args, own)] * 3


def hangs(args, asked, **kwargs):
    raise GradingFailed("it hung")


def says_nothing(args, asked, **kwargs):
    return None


async def test_a_batch_whose_grader_failed_has_no_rewards(make_args):
    args = make_args(custom_rm_path=f"{__name__}.hangs", group_rm=True)
    assert await batched_async_rm(args, []) == []
    for ask, split in ((batched_async_rm, False), (grouped_async_rm, True)):
        samples = [Sample(index=number) for number in range(3)]
        group = [samples[:2], samples[2]] if split else samples
        assert await ask(args, group) == [None] * 3
        assert [sample.status for sample in samples] == [Sample.Status.FAILED] * 3
    args.custom_rm_path = f"{__name__}.says_nothing"
    with pytest.raises(RolloutError, match="it returned None, expected a list of rewards"):
        await batched_async_rm(args, [Sample()])
