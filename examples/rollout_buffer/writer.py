"""A program of its own that makes trajectories for a run: it asks twice, grades, and writes to the buffer.

    python -m examples.rollout_buffer.writer --buffer http://127.0.0.1:8889

It knows the buffer's address alone. What the run wants, and where its engines are, the buffer says. Any
number of such programs may write, on any machine; here one asks for all that the run's ``--prompt-data`` has.
"""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from slime.utils.addresses import API_KEY
from slime.utils.http_utils import bearer_header
from slime_plugins.rollout_buffer.client import is_away, is_busy
from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator, Message
from slime_plugins.rollout_buffer.generator.outside import TASK_TYPE

AGAIN = {"role": "user", "content": "Are you sure? Say it once more, in \\boxed{}."}
_POLL_S = 0.5


class AsksAgain(BaseGenerator):
    """Two turns; the last one counts, right if its box holds the label."""

    def query(self, messages: list[Message], instance_id: str) -> list[Message]:
        answered = super().query(messages, instance_id)
        return super().query([*answered, AGAIN], instance_id)


def wanted_of(buffer: str, key: str | None, wait_s: float) -> dict[str, Any]:
    """What the run asks for, once it has started.

    Raises:
        TimeoutError: it has not within ``wait_s`` seconds.
    """
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        try:
            asked = _asked(buffer, key)
        except httpx.HTTPError as error:  # the buffer starts as well, or is busy
            if not (is_away(error) or is_busy(error)):
                raise
            asked = None
        if asked and asked["task_type"] == TASK_TYPE:
            return asked
        time.sleep(_POLL_S)
    raise TimeoutError(f"{buffer}: no run with --rollout-task-type {TASK_TYPE} within {wait_s:g} s")


def _asked(buffer: str, key: str | None) -> dict[str, Any] | None:
    answer = httpx.get(f"{buffer}/buffer/status", headers=bearer_header(key), trust_env=False)
    asked: dict[str, Any] | None = answer.raise_for_status().json()["data"]["asked"]
    return asked


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--buffer", required=True, help="the address of the rollout buffer")
    parser.add_argument("--wait", type=float, default=3600.0, help="seconds for the run to start")
    args = parser.parse_args(argv)
    key = os.environ.get(API_KEY)
    asked = wanted_of(args.buffer.rstrip("/"), key, args.wait)
    own = {"remote_buffer_url": args.buffer, **({"api_key": key} if key else {})}
    AsksAgain({**asked, **own}).run()


if __name__ == "__main__":
    main()
