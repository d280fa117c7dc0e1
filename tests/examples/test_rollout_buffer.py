"""A program of its own writes to the rollout buffer what a scripted engine says, and a rollout fetches it."""

import json
import threading
from collections import Counter

import httpx
import pytest

from examples.rollout_buffer import writer
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, create_app
from slime_plugins.rollout_buffer.trajectory import Start

# The engine and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403
from tests.serving import served


def chat(body):
    """Right for the first question alone, once it is asked again."""
    question, again = body["messages"][0]["content"], len(body["messages"]) > 1
    answer = "\\boxed{a0}" if question == "q0" and again else "hm"
    return {"choices": [{"message": {"role": "assistant", "content": answer}}]}


@pytest.fixture(params=[None, "a key"])
def buffer(request, monkeypatch):
    """The address of a service, with a key or without, and the service."""
    if request.param:
        monkeypatch.setenv(writer.API_KEY, request.param)
    service = RolloutBuffer(api_key=request.param)
    with served(create_app(service, api_key=request.param), lifespan="off") as port:
        yield f"http://127.0.0.1:{port}", service
    service.close()


def test_what_the_program_writes_is_trained_on(
    engine, make_args, make_source, tokenizer, buffer, monkeypatch
):
    monkeypatch.setattr(rollout_buffer_example, "POLL_S", 0.01)
    monkeypatch.setattr(writer, "_POLL_S", 0.01)
    url, service = buffer
    engine.answers["v1/chat/completions"] = chat
    engine.api_key = service._api_key
    program = threading.Thread(target=writer.main, args=(["--buffer", url],))
    program.start()
    args = make_args(
        rollout_buffer_url=url,
        rollout_task_type="outside",
        rollout_temperature=0.5,
        sglang_api_key=service._api_key,
    )
    groups = rollout_buffer_example.generate_rollout(args, 0, make_source(args)).samples
    program.join(300)
    assert not program.is_alive()
    rewards = {group[0].metadata["instance_id"]: [sample.reward for sample in group] for group in groups}
    assert len(rewards) == 3 and rewards.pop("0", [1.0, 1.0]) == [1.0, 1.0]
    assert set(map(tuple, rewards.values())) == {(0.0, 0.0)}
    for sample in (sample for group in groups for sample in group):
        ids = sample.tokens[-sample.response_length :]
        said = tokenizer.decode([t for t, mask in zip(ids, sample.loss_mask, strict=True) if mask])
        assert said.count("<|im_end|>") == 2 and "Are you sure?" not in said
        assert "Are you sure?" in tokenizer.decode(ids)
    assert {body["temperature"] for body in engine.seen("v1/chat/completions")} == {0.5}
    assert len(engine.seen("v1/chat/completions")) == 2 * 2 * 20  # turns, samples, rows
    assert service.asked["num_repeat_per_sample"] == 2 and "api_key" not in service.asked


def test_a_buffer_and_engines_that_are_busy_are_asked_again(buffer, engine, make_args, monkeypatch, tmp_path):
    """With 503 and with 429 at the first look at the buffer, at each turn, and at each trajectory."""
    url, service = buffer
    monkeypatch.setattr(writer, "_POLL_S", 0.01)
    engine.answers["v1/chat/completions"] = chat
    engine.api_key = service._api_key
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q0", "label": "a0"}) + "\n")
    asked = {"task_type": "outside", "num_repeat_per_sample": 2, "input_file": str(rows)}
    service.start(Start(**asked, remote_engine_url=engine.url))
    refused, handle = Counter(), httpx.HTTPTransport.handle_request

    def often_busy(self, request):
        key = request.url.path, request.content
        if refused[key] >= 2:
            return handle(self, request)
        refused[key] += 1
        return httpx.Response(503 if refused[key] == 1 else 429, headers={"Retry-After": "0"})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", often_busy)
    writer.main(["--buffer", url])
    assert {path for path, _ in refused} == {"/buffer/status", "/v1/chat/completions", "/buffer/write"}
    assert service.status().result()[1]["complete"] == 1


def test_a_run_that_does_not_come_is_told_by_name(buffer, monkeypatch):
    monkeypatch.setattr(writer, "_POLL_S", 0.01)
    url, _ = buffer
    with pytest.raises(TimeoutError, match=f"{url}: no run with --rollout-task-type outside within 0.1 s"):
        writer.main(["--buffer", url, "--wait", "0.1"])
