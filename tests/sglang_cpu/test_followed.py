"""``slime weights follow`` beside SGLang's own server, which has a key and generates meanwhile."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.manifest import VersionManifest, directory_of
from tests.cli.test_weights import GIVEN_UP_S, KEY, Trained, follow, group  # noqa: F401
from tests.engines.embedded import make_checkpoint, token_logprobs
from tests.run_args import run_args
from tests.sglang_cpu.server import sglang_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" not in os.environ, reason="run by scripts/test-sglang.sh"),
]

ENDLESS = 8000
"""New tokens of a request that still runs when the update is over."""
READ = list(range(200, 0, -1))
"""A prompt that is read before each update."""


class Stream:
    """A request under way, and what SGLang has said of it so far."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._more = client, threading.Condition()
        self._said: list[dict[str, Any]] = []
        self._failure: Exception | None = None
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        sampling = {"max_new_tokens": ENDLESS, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": [7, 8, 9], "sampling_params": sampling, "stream": True}
        try:
            with self._client.stream("POST", "/generate", json=body) as answer:
                for line in answer.raise_for_status().iter_lines():
                    if line.startswith("data: {"):
                        with self._more:
                            self._said.append(json.loads(line.removeprefix("data: "))["meta_info"])
                            self._more.notify_all()
        except Exception as error:
            with self._more:
                self._failure = error
                self._more.notify_all()

    def wait_for(self, version: str) -> dict[str, Any]:
        """What is first said of tokens that this version is named for."""

        def found() -> list[dict[str, Any]]:
            assert self._failure is None, self._failure
            return [one for one in self._said if one["weight_version"] == version]

        with self._more:
            assert self._more.wait_for(found, GIVEN_UP_S), f"{version}: {self._said[-1:]}"
            return found()[0]

    def end(self) -> dict[str, Any]:
        """What is said last."""
        self.thread.join(GIVEN_UP_S)
        assert not self.thread.is_alive() and self._failure is None, self._failure
        return self._said[-1]


@contextmanager
def served(checkpoint: Path, log: Path) -> Iterator[httpx.Client]:
    with (
        sglang_server(checkpoint, log, "--api-key", KEY) as address,
        httpx.Client(
            base_url=f"http://{address}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=GIVEN_UP_S,
            trust_env=False,
        ) as client,
    ):
        yield client


def answer(client: httpx.Client, prompt: list[int], **more: Any) -> tuple[list[int], list[float], int]:
    """Tokens, their log-probs, and how many tokens of the prompt were not computed."""
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
    found = client.post("/generate", json=body).raise_for_status().json()
    meta = found["meta_info"]
    return found["output_ids"], [one[0] for one in meta["output_token_logprobs"]], meta["cached_tokens"]


def _require_read_anew(client: httpx.Client, model: Any, **more: Any) -> None:
    """A prompt that older weights have read is computed by these."""
    ids, logprobs, _ = answer(client, READ, **more)
    assert logprobs == pytest.approx(token_logprobs(model, READ + ids)[-len(ids) :], abs=2e-4)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GIVEN_UP_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.usefixtures("group")
def test_it_generates_as_a_fresh_one_with_the_trainers_weights(follow: Any, tmp_path: Path) -> None:  # noqa: F811
    checkpoint, fresh, root = tmp_path / "served", tmp_path / "fresh", tmp_path / "versions"
    model = make_checkpoint(checkpoint)
    make_checkpoint(fresh)
    args = run_args(
        **dict(update_weight_transport="disk", update_weight_mode="delta", distributed_timeout_minutes=10),
        **dict(update_weight_disk_dir=str(root), synced_checkpoint=str(checkpoint), rollout_external=True),
    )
    source = Trained(checkpoint)
    update = WeightUpdate(run_config(args), source)
    with served(checkpoint, tmp_path / "served.log") as client:
        url = str(client.base_url).rstrip("/")
        update.connect([EngineEndpoint(url, KEY, 1, None)])
        (transport,) = update._routes[0].transports
        process, log = follow(str(root), url)
        for version, mode in enumerate(("abort", "retract", "in_place", "abort"), start=1):
            transport._pause_mode = mode
            started_at = client.get("/model_info").json()["weight_version"]
            stream = Stream(client)
            stream.wait_for(started_at)
            answer(client, READ)
            source.train()
            update.run(version)
            assert client.get("/model_info").json()["weight_version"] == str(version)
            if mode != "abort":
                stream.wait_for(str(version))  # it goes on
                model.load_state_dict(source.weights, strict=False)
                _require_read_anew(client, model, extra_key=str(version))
                assert (answer(client, READ)[2] > 0) == (mode == "in_place")
                client.post("/abort_request", json={"rid": "", "abort_all": True}).raise_for_status()
            assert stream.end()["finish_reason"]["type"] == "abort"
            if mode == "in_place":  # the follower has it flush once it is idle
                _wait_until(lambda: answer(client, READ)[2] == 0)
                _require_read_anew(client, model)
            prompt = [20 * version + place for place in range(20)]
            ids, logprobs, _ = answer(client, prompt)
            model.load_state_dict(source.weights, strict=False)
            wanted = token_logprobs(model, prompt + ids)[-len(ids) :]
            assert logprobs == pytest.approx(wanted, abs=2e-4), mode
        assert VersionManifest.read(directory_of(root, 4)).base.version == 3
        process.terminate()
        assert process.wait(GIVEN_UP_S) == 0
        said = log.read_text()
        assert "version 4 is served" in said and "HTTP" not in said and KEY not in said
    save_file(source.weights, fresh / "model.safetensors", {"format": "pt"})
    with served(fresh, tmp_path / "fresh.log") as client:
        found = answer(client, prompt)
        assert found[0] == ids and found[1] == pytest.approx(logprobs, abs=1e-5)
