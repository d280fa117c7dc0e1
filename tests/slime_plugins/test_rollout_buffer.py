"""Trajectories of other programs: the queue, the service, and a rollout that fetches from it."""

import threading
import time

import pytest
import uvicorn
from fastapi.testclient import TestClient

from slime.rollout.base_types import RolloutError
from slime_plugins.rollout_buffer import buffer, rollout_buffer_example
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, Start, create_app
from slime_plugins.rollout_buffer.buffer_queue import BufferQueue
from slime_plugins.rollout_buffer.generator import generator_of
from tests.page_runs import printed

# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403


def item(uid, group, reward=1.0):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return {"uid": uid, "instance_id": group, "messages": messages, "reward": reward, "extra_info": {}}


def test_a_group_is_given_out_once_it_is_complete_and_only_once():
    queue = BufferQueue(2)
    assert queue.append(item("1", "a", 0.0)) and queue.append(item("2", "b"))
    assert queue.take()[0] == {}
    assert queue.append(item("3", "a", 1.0)) and not queue.append(item("3", "a", 1.0))
    groups, meta = queue.take()
    assert [i["uid"] for i in groups["a"]] == ["1", "3"] and list(groups) == ["a"]
    assert meta == {
        **dict(total_samples=2, num_groups=1, avg_group_size=2.0, avg_reward=0.5),
        "finished_groups": ["a"],
    }
    assert queue.take()[0] == {}


def test_a_generator_may_judge_and_change_groups():
    queue = BufferQueue(
        9, lambda group, size: True, lambda group: group[:1], lambda groups: {"n": len(groups)}
    )
    queue.append(item("1", "a"))
    queue.append(item("2", "a"))
    groups, meta = queue.take()
    assert [i["uid"] for i in groups["a"]] == ["1"] and meta == {"n": 1}


def test_the_service_takes_trajectories_and_refuses_what_is_none():
    buffer = RolloutBuffer(group_size=1)
    client = TestClient(create_app(buffer))
    assert client.post("/get_rollout_data").json()["success"] is False
    assert client.post("/buffer/write", json=item("1", "a")).json()["success"] is True
    assert "is here already" in client.post("/buffer/write", json=item("1", "a")).json()["message"]
    for wrong in (item("2", "a") | {"messages": []}, item("2", "a") | {"reward": "good"}, {"uid": "3"}):
        assert client.post("/buffer/write", json=wrong).status_code == 422
    answer = client.post("/get_rollout_data").json()
    assert answer["success"] and [i["uid"] for i in answer["data"]["data"]] == ["1"]
    wrong = client.post("/start_rollout", json={"task_type": "none", "num_repeat_per_sample": 1})
    assert wrong.status_code == 400 and "wanted: math" in wrong.json()["detail"]
    with pytest.raises(ValueError, match="no generator makes it"):
        generator_of("none")


def test_the_command_of_the_page_serves_on_this_machine_alone(monkeypatch):
    (command,) = printed("python -m slime_plugins.rollout_buffer.buffer")
    served = []
    monkeypatch.setattr(buffer.uvicorn, "run", lambda app, **how: served.append((app, how)))
    buffer.main(command.words[3:])
    ((app, how),) = served
    assert (how["host"], how["port"]) == ("127.0.0.1", 8889)
    client = TestClient(app, base_url=f"http://{how['host']}")
    assert client.post("/get_rollout_data").json()["success"] is False


def test_one_generator_is_at_work_at_a_time(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(generator_of("math"), "run_rollout", lambda data: done.wait(120))
    buffer = RolloutBuffer()
    start = Start(task_type="math", num_repeat_per_sample=2)
    buffer.start(start)
    with pytest.raises(RuntimeError, match="a generator of math is at work"):
        buffer.start(start)
    done.set()


@pytest.fixture
def service():
    server = uvicorn.Server(
        uvicorn.Config(create_app(RolloutBuffer()), port=0, lifespan="off", log_level="error")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True


@pytest.fixture
def buffer_args(engine, make_args, service, monkeypatch):
    monkeypatch.setattr(rollout_buffer_example, "POLL_S", 0.01)
    monkeypatch.setattr(rollout_buffer_example, "_waiting", {})  # an earlier service may have had this port

    def make(**own):
        args = make_args(rollout_max_response_len=100, rollout_timeout=120)
        vars(args).update(
            {
                **dict(rollout_buffer_url=service, fetch_trajectory_retry_times=-1, rollout_task_type="math"),
                **dict(min_batch_collection_ratio=1.0, **own),
            }
        )
        return args

    return make


def chat(body):
    question = body["messages"][-1]["content"]
    answer = f"\\boxed{{a{question[1:]}}}" if question in ("q0", "q1") else "?"
    return {"choices": [{"message": {"role": "assistant", "content": answer}}]}


def test_rollouts_fetch_what_the_generator_has_made(engine, buffer_args, make_source, tokenizer):
    engine.answers["v1/chat/completions"] = chat
    args = buffer_args()
    source = make_source(args)
    first = rollout_buffer_example.generate_rollout(args, 0, source).samples
    second = rollout_buffer_example.generate_rollout(args, 1, source).samples
    assert [len(group) for group in first + second] == [2] * 6
    samples = [sample for group in first + second for sample in group]
    assert [sample.index for sample in samples] == list(range(12))
    assert [group[0].group_index for group in first + second] == list(range(6))
    assert len(set(source.get_metadata()["finished_groups"])) == 6
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length and 1 in sample.loss_mask
        assert sample.tokens[-sample.response_length :] == tokenizer.encode(sample.response)
        assert sample.reward == float(sample.metadata["instance_id"] in ("0", "1"))
    asked = engine.seen("v1/chat/completions")
    assert len(asked) <= 40 and asked[0]["max_tokens"] == 100


def test_a_generator_that_fails_ends_the_rollout(engine, buffer_args, make_source):
    args = buffer_args()
    with pytest.raises(RolloutError, match="the generator failed: HTTPStatusError"):
        rollout_buffer_example.generate_rollout(args, 0, make_source(args))


def test_fetches_in_vain_are_counted(engine, buffer_args, make_source, monkeypatch):
    monkeypatch.setattr(generator_of("math"), "run_rollout", lambda data: None)
    args = buffer_args()
    args.fetch_trajectory_retry_times = 2
    with pytest.raises(RolloutError, match="no group is complete after 3 fetches"):
        rollout_buffer_example.generate_rollout(args, 0, make_source(args))
    args.rollout_buffer_url = None
    with pytest.raises(RolloutError, match="--rollout-buffer-url: not given"):
        rollout_buffer_example.generate_rollout(args, 0, make_source(args))
    with pytest.raises(RolloutError, match="cannot evaluate"):
        rollout_buffer_example.generate_rollout(args, 0, make_source(args), evaluation=True)
