"""A process that plays an environment of ``verifiers``: ``pip install 'slime[verifiers]'``.

    python -m slime.environments.verifiers_host gsm8k --rows train.jsonl

writes the environment's data as rows for ``--prompt-data``. Without ``--rows`` it plays episodes for
`slime.rollout.verifiers_episodes`: a JSON line in for each, and one out. The library sets handlers of signals
and runs rewards on its event loop, which is why it has a process to itself.
"""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

INPUT = "verifiers"
"""Key of a row's metadata under which the environment finds its own row again, but for the prompt."""
_LONGEST_LINE = 64 << 20


def rows_of(environment: Any, evaluation: bool) -> list[dict[str, Any]]:
    """Its data as rows of slime's."""
    data = environment.get_eval_dataset() if evaluation else environment.get_dataset()
    return [{"prompt": row.pop("prompt"), "metadata": {INPUT: row}} for row in map(dict, data)]


def ending_of(output: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of an episode: a reward that is a number, or why there is none."""
    reward, error = output.get("reward"), output.get("error")
    worth = None if reward is None else float(reward)
    if error is None and (worth is None or not math.isfinite(worth)):
        error = f"its reward is {worth} (wanted: a finite number)"
    return {
        "reward": worth if error is None else None,
        "metrics": {name: float(value) for name, value in (output.get("metrics") or {}).items()},
        "is_truncated": bool(output.get("is_truncated")),
        "stop_condition": output.get("stop_condition"),
        "error": None if error is None else str(error)[:2000],
    }


class Host:
    """Plays episodes side by side, and says how each ended.

    Args:
        environment: of verifiers.
        replies: a descriptor to write to.
    """

    def __init__(self, environment: Any, replies: int) -> None:
        self._environment, self._replies = environment, replies
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._client: Any = None

    async def serve(self) -> None:
        """Until standard input ends; says first that it is ready."""
        os.write(self._replies, b"{}\n")
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin)
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" in asked:
                self._cancel(asked["cancel"])
                continue
            self._playing[asked["id"]] = loop.create_task(self._answer(asked))

    def _cancel(self, number: int) -> None:
        if task := self._playing.get(number):
            task.cancel()

    async def _answer(self, asked: dict[str, Any]) -> None:
        try:
            told = await self._play(asked)
        except asyncio.CancelledError:
            told = {"error": "cancelled"}
        except Exception as error:  # the environment's code, which may raise anything
            told = {"error": f"{type(error).__name__}: {error}"[:2000]}
        del self._playing[asked["id"]]
        os.write(self._replies, json.dumps({**told, "id": asked["id"]}).encode() + b"\n")

    async def _play(self, asked: dict[str, Any]) -> dict[str, Any]:
        output = await self._environment.run_rollout(
            asked["input"], self._client_of(asked["url"], asked["key"]), "default", {}
        )
        return ending_of(output)

    def _client_of(self, url: str, key: str) -> Any:
        """One pool of connections for all episodes, whose keys say which is which."""
        import openai
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        if self._client is None:
            self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None)
        return OpenAIChatCompletionsClient(self._client.with_options(api_key=key, base_url=f"{url}/v1"))


def _keep_the_reply_pipe() -> int:
    """What the environment prints must not be taken for a reply."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", help="its id, as load_environment of verifiers takes it")
    parser.add_argument("--options", type=json.loads, default={}, help="of it by name, as a JSON object")
    parser.add_argument("--rows", type=Path, help="write its data there, and play nothing")
    parser.add_argument("--eval", action="store_true", help="with --rows: the data of its evaluation")
    asked = parser.parse_args(argv)
    replies = _keep_the_reply_pipe()
    import verifiers as vf

    environment = vf.load_environment(asked.environment, **asked.options)
    if asked.rows is None:
        asyncio.run(Host(environment, replies).serve())
        return
    asked.rows.parent.mkdir(parents=True, exist_ok=True)
    rows = rows_of(environment, asked.eval)
    asked.rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    os.write(replies, f"{len(rows)} rows in {asked.rows}\n".encode())


if __name__ == "__main__":
    main()
