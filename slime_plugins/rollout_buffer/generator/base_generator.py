"""One answer for each repetition of each prompt, by chat completions; right or wrong by mathematics.

What ``run_rollout`` reads of its data: ``input_file`` (JSONL rows with ``prompt`` and ``label``),
``num_repeat_per_sample``, ``remote_engine_url`` (of a router or an engine), ``remote_buffer_url``, and if
they are there ``sampling_params``, ``num_process`` (requests at a time), ``skip_instance_ids``,
``skip_uids`` (what was written before the service ended), ``api_key`` (of the engines and the service).
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from slime.utils.grading.boxes import boxed_answer
from slime.utils.http_utils import bearer_header
from slime_plugins.rollout_buffer.client import BufferClient, is_away, is_busy, retrying

TASK_TYPE = "math"
_TIMEOUT_S, _PAUSE_S = 3600.0, 0.1
_AWAY_S = 30.0
"""How long the engines' router may give no answer, or a worker of it none, before the run is over."""
_CUT_OFF = "abort"
"""Why an answer ended if the engine stopped for new weights (``--pause-generation-mode abort``)."""
Message = dict[str, Any]


class BaseGenerator:
    """Override `query` to say more than one thing, or `reward` to judge in another way."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.engine = data["remote_engine_url"].rstrip("/")
        key = data.get("api_key")
        self.buffer = BufferClient(data["remote_buffer_url"], key, _TIMEOUT_S)
        self.client = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, headers=bearer_header(key))

    def query(self, messages: list[Message], instance_id: str) -> list[Message]:
        """The conversation as it went on.

        Raises:
            TimeoutError: for an hour, each answer was cut off.
        """
        end = time.monotonic() + _TIMEOUT_S
        while (choice := self._choice(messages)).get("finish_reason") == _CUT_OFF:
            if time.monotonic() >= end:
                raise TimeoutError(f"{instance_id}: each answer was cut off for {_TIMEOUT_S:g} s")
            time.sleep(_PAUSE_S)
        return [*messages, {"role": "assistant", "content": choice["message"]["content"] or ""}]

    def _choice(self, messages: list[Message]) -> dict[str, Any]:
        body = {"model": "default", "messages": messages, **self.data.get("sampling_params", {})}
        return retrying(_seconds_of)(self._asked, body).json()["choices"][0]

    def _asked(self, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(f"{self.engine}/v1/chat/completions", json=body).raise_for_status()

    def reward(self, messages: list[Message], label: Any) -> float:
        answer = boxed_answer(messages[-1]["content"])
        return float(answer is not None and answer.strip() == str(label).strip())

    def run(self) -> None:
        """All answers; the first failure ends it."""
        with ThreadPoolExecutor(int(self.data.get("num_process", 16))) as pool:
            for _ in pool.map(self._one, self._tasks()):
                pass

    def _tasks(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Uids, instances and rows: the same ones whenever it is started."""
        written = set(self.data.get("skip_uids") or ())
        done = set(self.data.get("skip_instance_ids") or ())
        with Path(self.data["input_file"]).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                instance_id = str(row.get("instance_id", number))
                if instance_id in done:
                    continue
                for repetition in range(self.data["num_repeat_per_sample"]):
                    uid = f"{number}-{repetition}"
                    if uid not in written:
                        yield uid, instance_id, row

    def _one(self, task: tuple[str, str, dict[str, Any]]) -> None:
        uid, instance_id, row = task
        prompt = row["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        messages = self.query(messages, instance_id)
        item = {
            "uid": uid,
            "instance_id": instance_id,
            "messages": messages,
            "reward": self.reward(messages, row.get("label")),
            "extra_info": {},
        }
        self.buffer.write(item)


def _seconds_of(error: BaseException) -> float:
    """Seconds: engines that are started again are waited for, a router that is gone is not for long."""
    if is_busy(error):
        return _TIMEOUT_S
    broken = isinstance(error, httpx.HTTPStatusError) and error.response.is_server_error
    return _AWAY_S if broken or is_away(error) else 0.0


def run_rollout(data: dict[str, Any]) -> None:
    BaseGenerator(data).run()
