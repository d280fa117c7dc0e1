"""A teacher behind an engine: what it is asked, and what is taken off its answer."""

import asyncio

import pytest

from slime.rollout import on_policy_distillation as opd
from slime.rollout.base_types import RolloutError
from slime.utils.types import Sample
from tests.engines.embedded import Server, make_checkpoint, token_logprobs
from tests.run_args import run_args


def sample_with(answer, response_length=2):
    return Sample(index=3, tokens=[5, 6, 7, 8], response_length=response_length, reward=answer)


def answer(*log_probs):
    return {"meta_info": {"input_token_logprobs": [[value, 0, None] for value in log_probs]}}


def test_the_teacher_is_asked_about_all_tokens_and_generates_none(monkeypatch):
    asked = []

    async def post_json(url, payload, allowed_hosts):
        asked.append((url, payload))
        return {"any": "answer"}

    monkeypatch.setattr(opd, "post_json", post_json)
    args = run_args(rm_url="http://teacher/generate")
    assert asyncio.run(opd.reward_func(args, sample_with(None), evaluation=False)) == {"any": "answer"}
    sampling = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    wanted = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling}
    wanted |= {"return_logprob": True, "logprob_start_len": 0}
    assert asked == [("http://teacher/generate", wanted)]


@pytest.mark.parametrize(("length", "wanted"), [(2, [-2.0, -3.0]), (0, []), (3, [-1.0, -2.0, -3.0])])
def test_log_probs_of_the_response_are_taken_and_rewards_are_zero(length, wanted):
    samples = [sample_with(answer(None, -1.0, -2.0, -3.0), length)]
    assert opd.post_process_rewards(run_args(), samples) == ([0.0], [0.0])
    assert samples[0].teacher_log_probs == wanted


@pytest.mark.parametrize("bad", [0.5, {"meta_info": {}}, answer(None, None, -1.0, -1.0), answer(None, -1.0)])
def test_an_answer_without_log_probs_is_refused_with_the_name_of_its_sample(bad):
    with pytest.raises(RolloutError, match=r"sample 3.*teacher"):
        opd.post_process_rewards(run_args(), [sample_with(bad)])


def test_a_teacher_of_the_run_is_asked_behind_its_router(monkeypatch):
    asked = []

    async def post(url, payload):
        asked.append(url)
        return {"any": "answer"}

    monkeypatch.setattr(opd, "post", post)
    routers = {"policy": ("127.0.0.1", 3000), "teacher": ("127.0.0.1", 3001)}
    args = run_args(sglang_model_routers=routers)
    args.sglang_router_ip, args.sglang_router_port = routers["policy"]
    assert asyncio.run(opd.reward_func(args, sample_with(None))) == {"any": "answer"}
    assert asked == ["http://127.0.0.1:3001/generate"]


def test_without_an_address_there_is_no_teacher():
    with pytest.raises(ValueError, match="--rm-url"):
        asyncio.run(opd.reward_func(run_args(), sample_with(None)))


def test_an_engine_judges_the_response_as_its_model_does(tmp_path):
    model = make_checkpoint(tmp_path / "teacher")
    samples = [
        Sample(index=0, tokens=[72, 105, 33, 10, 65, 66], response_length=4),
        Sample(index=1, tokens=[72, 105, 33], response_length=0),
    ]
    server = Server(tmp_path / "teacher")
    try:
        server.wait_ready()
        args = run_args(rm_url=f"{server.url}/generate")
        for sample in samples:
            sample.reward = asyncio.run(opd.reward_func(args, sample))
    finally:
        server.stop()
    assert opd.post_process_rewards(args, samples) == ([0.0, 0.0], [0.0, 0.0])
    assert samples[0].teacher_log_probs == pytest.approx(
        token_logprobs(model, samples[0].tokens)[-4:], abs=1e-5
    )
    assert samples[1].teacher_log_probs == []
