"""Whole runs with more than one model, and with engines and a router that somebody else has started."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.backends.sglang_utils.client import EngineClient
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample
from tests.engines import free_port
from tests.engines.embedded import Server
from tests.forking import ForkedScript
from tools.make_tiny_model import main as make_tiny_model

pytestmark = pytest.mark.e2e

_KILL_AT = 20  # a sample of the second rollout
NOTE = "SLIME_TEST_JUDGE"
PAGE = "SLIME_TEST_PAGE"
UPDATE_NOTE = "SLIME_TEST_UPDATE"


async def judged_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """What the judge says of a sample; in the second rollout its only engine is killed before it is asked."""
    note = Path(os.environ[NOTE])
    if (sample.index or 0) >= _KILL_AT and not note.exists():
        note.write_text("killed")
        note.with_name("page").write_text(_page())
        os.kill(_judge(note.parent), signal.SIGKILL)
    payload = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = await post(get_model_url(args, "judge"), payload)
    version = answer["meta_info"]["weight_version"]
    if version != "default":
        raise ValueError(f"the judge has got weights of version {version}")
    return float(answer["output_ids"][0] % 2)


def _page() -> str:
    """The metrics of the run, once its two engines and two routers are on the page."""
    deadline = time.monotonic() + 300
    while True:
        with urlopen(os.environ[PAGE], timeout=120) as answer:
            page: str = answer.read().decode()
        up = [line[-2:] for line in page.splitlines() if line.startswith("slime_up{")]
        if up == [" 1"] * 4 or time.monotonic() > deadline:
            return page


def _judge(directory: Path) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        mine = "slime.backends.embedded_engine" in command and f"{directory}/judge" in command
        if mine and "supervisor" not in command:
            return int(entry.name)
    raise AssertionError(f"no judge below {directory}")


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """The file of a policy, and of a frozen judge of another size."""
    shape = ["--hidden-size", "32", "--num-layers", "1"]
    make_tiny_model(["--output", str(tmp_path / "judge"), "--seed", "5", *shape])
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"""
        sglang:
          - {{name: policy, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
          - name: judge
            model_path: {tmp_path}/judge
            server_groups: [{{worker_type: regular, num_gpus: 1, overrides: {{max_running_requests: 8}}}}]
        """
    )
    return path


def test_a_judge_beside_the_policy_is_never_updated_and_comes_back_when_it_was_killed(
    start, rl_flags, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = fleet.with_name("note")
    monkeypatch.setenv(NOTE, str(note))
    port = free_port()
    monkeypatch.setenv(PAGE, f"http://127.0.0.1:{port}/metrics")
    flags = ["--sglang-config", fleet, "--rollout-num-gpus", 2, "--num-rollout", 3, "--use-fault-tolerance"]
    flags += ["--prometheus-port", port, "--custom-rm-path", "tests.e2e.test_fleets.judged_reward"]
    run = start([*rl_flags, *flags])
    run.expect_success()
    assert note.read_text() == "killed"
    assert len(run.rows("train")) == 3
    fates = [
        (row["fleet/judge/engines"], row["fleet/judge/replaced"]) for row in run.rows("rollout").values()
    ]
    assert fates == [(1, 0), (1, 1), (1, 1)]
    _expect_all_on(note.with_name("page").read_text())
    run.expect_no_processes()


def _expect_all_on(page: str) -> None:
    """Expects the metrics of both models' engines and routers beside those of the driver."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = [(one.labels, one.value) for one in samples if one.name == "slime_up"]
    up = {(labels["model"], labels.get("engine")): value for labels, value in found}
    assert up == {("policy", "0"): 1, ("policy", None): 1, ("judge", "1"): 1, ("judge", None): 1}
    tokens = {
        one.labels["engine"]: one.value for one in samples if one.name == "sglang:generation_tokens_total"
    }
    assert tokens.keys() == {"0", "1"} and min(tokens.values()) > 0
    routers = {one.labels["model"] for one in samples if "router" in one.labels and one.name != "slime_up"}
    assert routers == {"policy", "judge"} and any(one.name == "slime_rollout_raw_reward" for one in samples)


@pytest.fixture
def someone_elses(model: Path, tmp_path: Path):
    """Two engines, and a router without any, on ports of their own."""
    servers = [Server(model, "--dtype", "float32") for _ in range(2)]
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    metrics = ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
    with (tmp_path / "router.log").open("w") as log:
        router = subprocess.Popen([*command, *metrics], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield [server.wait_ready() for server in servers], router, port
    finally:
        router.kill()
        router.wait()
        for server in servers:
            server.stop()


def test_engines_and_a_router_of_somebody_elses_are_used_updated_and_left_alone(
    start, rl_flags, someone_elses
) -> None:
    servers, router, port = someone_elses
    addresses = [server.url.removeprefix("http://") for server in servers]
    flags = ["--rollout-external", "--rollout-external-engine-addrs", *addresses]
    run = start([*rl_flags, *flags, "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", port])
    run.expect_success()
    assert len(run.rows("train")) == 2
    run.expect_no_processes()
    for server in servers:
        assert server.process.poll() is None
        assert server.client.get("/model_info").json()["weight_version"] == "3"
    assert router.poll() is None
    assert servers[0].client.get(f"http://127.0.0.1:{port}/workers").json()["workers"] == []


@pytest.fixture
def follow(tmp_path: Path):
    """A function that has an engine follow versions of weights; what it started is killed at the end."""
    started: list[ForkedScript] = []

    def start(place: Path, server: Server) -> None:
        name = f"follower{len(started)}"
        words = ["weights", "follow", str(place), "--engine", server.url, "--name", name]
        words += ["--local-checkpoint-dir", str(tmp_path / name), "--poll-seconds", "0.1"]
        started.append(ForkedScript("slime.cli", words, str(tmp_path / f"{name}.log")))

    yield start
    for process in started:
        process.kill()
        process.wait(60)


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
def test_changes_reach_engines_of_somebody_elses_by_their_followers(
    script: str, start, rl_flags, model: Path, tmp_path: Path, follow
) -> None:
    versions = tmp_path / "versions"
    servers = [Server(model, "--dtype", "float32") for _ in range(2)]
    try:
        for server in servers:
            follow(versions, server.wait_ready())
        flags = ["--rollout-external-engine-addrs", *(server.url for server in servers)]
        flags += ["--update-weight-mode", "delta", "--update-weight-transport", "disk"]
        flags += ["--update-weight-disk-dir", versions, "--check-weight-checksums"]
        run = start([*rl_flags, *flags], script=script).expect_success()
        rows = run.rows("rollout").values()
        assert all(0 < row["perf/update_weights_density"] < 1 for row in rows)
        assert all(row["perf/update_weights_pause_time"] > 0 for row in rows)
        assert run.rows("train")[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
        for server in servers:
            assert server.client.get("/model_info").json()["weight_version"] == "3"
    finally:
        for server in servers:
            server.stop()


def die_in_the_second_update(args: Namespace) -> None:
    """The engine has got one bucket of it, and no more, when the trainer's process is killed."""
    note = Path(os.environ[UPDATE_NOTE])
    send, begin, begun = EngineClient.update_weights_from_distributed, EngineClient.begin_weight_update, []

    def counted(self: EngineClient) -> None:
        begun.append(self)
        begin(self)

    def last(self: EngineClient, *arguments: Any, **options: Any) -> None:
        send(self, *arguments, **options)
        if len(begun) == 2 and not note.exists():
            note.write_text("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    EngineClient.begin_weight_update = counted  # type: ignore[method-assign]
    EngineClient.update_weights_from_distributed = last  # type: ignore[method-assign]


@pytest.mark.parametrize("tolerant", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_engine_of_somebody_elses_with_half_an_update_is_taken_over(
    tolerant: bool, start, rl_flags, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run that goes on from the checkpoint, or by the same one with other ranks."""
    monkeypatch.setenv(UPDATE_NOTE, str(tmp_path / "note"))
    server = Server(model, "--dtype", "float32").wait_ready()
    flags = ["--rollout-external-engine-addrs", server.url.removeprefix("http://")]
    flags += ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", 1]
    flags += ["--custom-megatron-init-path", "tests.e2e.test_fleets.die_in_the_second_update"]
    flags += ["--update-weight-buffer-size", 20_000, *(["--use-fault-tolerance"] if tolerant else [])]
    try:
        run = start([*rl_flags, *flags])
        if not tolerant:
            assert run.wait() == 1
            assert "rank 0" in run.output.splitlines()[-1]
            assert server.client.get("/ready").status_code == 503
            run = start([*rl_flags, *flags])
        run.expect_success()
        assert (tmp_path / "note").exists() and 1 in run.rows("train")
        version = server.client.get("/model_info").json()["weight_version"]
        assert version in ("3", "4")
        (last,) = json.loads((tmp_path / "saved/last_engines.json").read_text())["engines"]
        assert (last["state"], last["url"], last["version"]) == ("serving", server.url, version)
    finally:
        server.stop()


@pytest.mark.parametrize("fault", ["rope", pytest.param("tensor", marks=pytest.mark.nightly)])
def test_a_run_ends_at_engines_that_serve_another_policy(
    fault: str, start, rl_flags, model: Path, tmp_path: Path
) -> None:
    if fault == "rope":
        served = shutil.copytree(model, tmp_path / "served")
        config = json.loads((served / "config.json").read_text())
        config.update(rope_theta=3.0, rope_parameters={"rope_type": "default", "rope_theta": 3.0})
        (served / "config.json").write_text(json.dumps(config))
        fleet = tmp_path / "fleet.yaml"
        groups = "server_groups: [{worker_type: regular, num_gpus: 1}]"
        fleet.write_text(f"sglang: [{{name: default, model_path: {served}, update_weights: true, {groups}}}]")
        flags = ["--sglang-config", fleet]
    else:
        flags = ["--custom-megatron-init-path", "tests.e2e.plugins.perturb_a_tensor", "--colocate"]
    run = start([*rl_flags, *flags, "--num-rollout", 1])
    assert run.wait() == 1
    last = run.output.strip().splitlines()[-1]
    assert "does not serve the policy of the megatron trainer: on a prompt of 128 tokens" in last
    assert "apart on average, wanted at most 0.001 (float32); the mean is " in last
    assert not run.rows("rollout")
    run.expect_no_processes()
