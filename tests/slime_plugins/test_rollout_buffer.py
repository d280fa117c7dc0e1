"""Trajectories of other programs: the queue, the service, and a rollout that fetches from it."""

import threading
import time
from contextlib import closing

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from slime.rollout.base_types import RolloutError
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import buffer, buffer_queue, rollout_buffer_example
from slime_plugins.rollout_buffer import service as services
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, Start, create_app
from slime_plugins.rollout_buffer.buffer_queue import BufferQueue
from slime_plugins.rollout_buffer.client import BufferClient
from slime_plugins.rollout_buffer.generator import generator_of
from slime_plugins.rollout_buffer.runs import RUNNING
from slime_plugins.rollout_buffer.samples import item_of
from slime_plugins.rollout_buffer.store import Store
from tests.page_runs import printed

# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403
from tests.serving import served


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


def test_a_group_that_its_generator_never_takes_ends_at_a_bound(monkeypatch):
    monkeypatch.setattr(buffer_queue, "LARGEST_FACTOR", 2)
    buffer = RolloutBuffer(group_size=1)
    buffer.queue = BufferQueue(1, lambda group, size: False, store=buffer._store)
    client = TestClient(create_app(buffer))
    for n in range(2):
        assert client.post("/buffer/write", json=item(str(n), "a")).status_code == 200
    refused = client.post("/buffer/write", json=item("2", "a"))
    assert refused.status_code == 409 and "group a: 3 trajectories, and is_valid" in refused.json()["detail"]
    told = client.post("/get_rollout_data").json()["message"]
    assert told == "no group is complete (2 trajectories wait in 1 groups)"
    buffer.close()


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


def test_the_command_of_the_page_serves_on_this_machine_alone(monkeypatch, tmp_path):
    (command,) = printed("python -m slime_plugins.rollout_buffer.buffer")
    served = []

    def serve(app, host, port, **how):
        client = TestClient(app, base_url=f"http://{host}")
        served.append((host, port, client.post("/get_rollout_data").json()["success"]))

    monkeypatch.setattr(buffer.uvicorn, "run", serve)
    monkeypatch.chdir(tmp_path)
    buffer.main(command.words[3:])
    assert served == [("127.0.0.1", 8889, False)]
    (file,) = tmp_path.glob("*.sqlite")
    assert file.stat().st_mode & 0o77 == 0, "what is written is its owner's alone"


def test_one_generator_is_at_work_at_a_time(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(generator_of("math"), "run_rollout", lambda data: done.wait(120))
    buffer = RolloutBuffer()
    start = Start(task_type="math", num_repeat_per_sample=2)
    buffer.start(start)
    buffer.start(start)  # as after a lost answer
    with pytest.raises(RuntimeError, match="a generator of math is at work"):
        buffer.start(Start(task_type="math", num_repeat_per_sample=3))
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
    monkeypatch.setattr(
        rollout_buffer_example, "_started", set()
    )  # an earlier service may have had this port

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


def test_tokens_masks_log_probs_and_versions_become_those_of_samples(
    engine, buffer_args, make_source, monkeypatch, service
):
    """What a rollout made, written by another program and fetched, is the sample that it was."""
    made = [Sample(tokens=[5, 6, 7], reward=0.5, prompt=[{"role": "user", "content": "q"}]) for _ in range(2)]
    for number, sample in enumerate(made):
        meta = {"weight_version": str(number), "finish_reason": {"type": "length"}}
        sample.append_response_tokens(tokens=[8, 9], log_probs=[-0.25, -1e-17], meta_info=meta, text="")
        sample.append_response_tokens(tokens=[3], trainable=False)
        sample.metadata = {"instance_id": "a"}
    written = BufferClient(service)

    def run_rollout(data):
        for number, sample in enumerate(made):
            written.write(item_of(sample, str(number), "a"))

    monkeypatch.setattr(generator_of("math"), "run_rollout", run_rollout)
    args = buffer_args(rollout_batch_size=1, n_samples_per_prompt=2)
    (group,) = rollout_buffer_example.generate_rollout(args, 0, make_source(args)).samples
    names = (
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "version_spans",
        "weight_versions",
    )
    for name in (*names, "token_versions", "reward", "status", "prompt", "metadata"):
        assert [getattr(s, name) for s in group] == [getattr(s, name) for s in made], name
    assert group[1].token_versions == ["1", "1", None]
    with pytest.raises(ValueError, match="reward of sample 7: None"):
        item_of(Sample(), "7", "a")


def test_a_rollout_takes_what_it_needs_and_leaves_the_rest_and_what_it_failed_with(
    engine, buffer_args, make_source, monkeypatch, service
):
    writer = BufferClient(service)

    def run_rollout(data):
        for number in range(5):
            writer.write(item(str(number), str(number)))
        raise OSError("no more")

    monkeypatch.setattr(generator_of("math"), "run_rollout", run_rollout)
    args = buffer_args(rollout_batch_size=3, n_samples_per_prompt=1)
    source = make_source(args)
    first = rollout_buffer_example.generate_rollout(args, 0, source).samples
    assert [group[0].metadata["instance_id"] for group in first] == ["0", "1", "2"]
    with pytest.raises(RolloutError, match="the generator failed: OSError: no more"):
        rollout_buffer_example.generate_rollout(args, 1, source)
    status = httpx.get(f"{service}/buffer/status").json()["data"]
    assert status["waiting"] == 2 and status["groups"]["acknowledged"] == 3
    assert status["groups"]["leased"] == 2, "they come again"
    assert writer.fetch() == []


def test_a_generator_that_ended_with_its_service_is_started_for_what_is_missing(
    engine, buffer_args, make_source, monkeypatch, tmp_path
):
    engine.answers["v1/chat/completions"] = chat
    with closing(Store(tmp_path / "b.sqlite")) as store:
        store.begin_run("math", 2, RUNNING)
        store.add(item("1-0", "1", 0.25))
    own = RolloutBuffer(file=tmp_path / "b.sqlite")
    with served(create_app(own)) as port:
        url = f"http://127.0.0.1:{port}"
        rollout_buffer_example._started.add(url)
        args = buffer_args()
        args.rollout_batch_size = 2
        args.rollout_buffer_url = url
        source = make_source(args)
        source.update_metadata({"finished_groups": [str(number) for number in range(2, 100)]})
        groups = rollout_buffer_example.generate_rollout(args, 0, source).samples
        status = httpx.get(f"{url}/buffer/status").json()["data"]
    rewards = {group[0].metadata["instance_id"]: [sample.reward for sample in group] for group in groups}
    assert rewards == {"0": [1.0, 1.0], "1": [0.25, 1.0]}
    assert status["groups"]["acknowledged"] == 2 and status["groups"]["leased"] == 0


def test_two_groups_of_one_prompt_stay_two_groups(engine, buffer_args, make_source, monkeypatch, service):
    writer = BufferClient(service)

    def run_rollout(data):
        for uids in ("12", "34"):
            for uid in uids:
                writer.write(item(uid, "a"))
            while not httpx.get(f"{service}/buffer/status").json()["data"]["groups"]["leased"]:
                time.sleep(0.01)

    monkeypatch.setattr(generator_of("math"), "run_rollout", run_rollout)
    args = buffer_args(rollout_batch_size=2, n_samples_per_prompt=2)
    source = make_source(args)
    groups = rollout_buffer_example.generate_rollout(args, 0, source).samples
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert source.get_metadata()["finished_groups"] == ["a", "a"]


def test_a_start_that_is_not_answered_ends_with_the_time_of_the_rollout(
    engine, buffer_args, make_source, monkeypatch
):
    answers, ended = threading.Event(), []
    monkeypatch.setattr(
        services, "generator_of", lambda task: (ended.append(answers.wait(120)), generator_of(task))[1]
    )
    args = buffer_args(rollout_batch_size=1)
    args.rollout_timeout = 0.5
    with pytest.raises(RolloutError, match=r"0 groups .* after 0.5 s"):
        rollout_buffer_example.generate_rollout(args, 0, make_source(args))
    assert not ended
    answers.set()
