"""The service: whoever makes trajectories writes them here, and the rollout function fetches whole groups.

    python -m slime_plugins.rollout_buffer.buffer --port 8889

POST /start_rollout starts a generator of ``generator/`` in the background, POST /buffer/write takes a
trajectory, POST /get_rollout_data gives out the groups that are complete. It listens on this machine alone
unless told otherwise; pages of other sites are refused, and nothing else protects it.
"""

import argparse
import logging
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from slime.utils.request_gate import RequestGate
from slime_plugins.rollout_buffer.buffer_queue import BufferQueue
from slime_plugins.rollout_buffer.generator import generator_of

logger = logging.getLogger(__name__)
BODY_BYTES = 64 * 2**20
"""The most bytes of a trajectory."""


class Trajectory(BaseModel):
    """A conversation with a reward; those of one prompt share ``instance_id``."""

    uid: str
    instance_id: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    reward: float = Field(allow_inf_nan=False)
    extra_info: dict[str, Any] = {}


class BufferResponse(BaseModel):
    success: bool
    message: str = ""
    data: dict[str, Any] | None = None


class Start(BaseModel, extra="allow"):
    """What a generator is told; further fields are its own."""

    task_type: str
    num_repeat_per_sample: int = Field(gt=0)


class RolloutBuffer:
    """One queue, and the generator that fills it.

    Attributes:
        failure: what ended the last generator, if it failed.
    """

    def __init__(self, group_size: int = 16, task_type: str = "math") -> None:
        self.task_type = task_type
        self.queue = BufferQueue(group_size)
        self.failure: str | None = None
        self._running: threading.Thread | None = None

    def start(self, start: Start) -> None:
        """Runs the generator in the background, on an empty queue.

        Raises:
            ValueError: no generator makes this type of task.
            RuntimeError: one is at work.
        """
        if self._running is not None and self._running.is_alive():
            raise RuntimeError(f"a generator of {self.task_type} is at work")
        module = generator_of(start.task_type)
        self.task_type, self.failure = start.task_type, None
        self.queue = BufferQueue(
            start.num_repeat_per_sample,
            getattr(module, "is_valid_group", None),
            getattr(module, "transform_group", None),
            getattr(module, "get_group_data_meta_info", None),
        )
        self._running = threading.Thread(target=self._run, args=(module, start.model_dump()), daemon=True)
        self._running.start()

    def _run(self, module: ModuleType, data: dict[str, Any]) -> None:
        try:
            module.run_rollout(data)
        except Exception as error:  # the generator is the user's code; whoever fetches is told
            logger.exception("generator of %s failed", self.task_type)
            self.failure = f"{type(error).__name__}: {error}"


def create_app(buffer: RolloutBuffer, host: str = "") -> FastAPI:
    """The service.

    Args:
        host: on which it will listen, where that is known.
    """
    app = FastAPI()
    app.add_middleware(RequestGate, host=host, most_bytes=BODY_BYTES)

    @app.post("/buffer/write")
    def write(item: Trajectory) -> BufferResponse:
        new = buffer.queue.append(item.model_dump())
        return BufferResponse(success=True, message="" if new else f"{item.uid} is here already")

    @app.post("/get_rollout_data")
    def fetch() -> BufferResponse:
        groups, meta_info = buffer.queue.take()
        if not groups:
            message = f"the generator failed: {buffer.failure}" if buffer.failure else "no group is complete"
            return BufferResponse(success=False, message=message, data={"failed": bool(buffer.failure)})
        items = [item for group in groups.values() for item in group]
        return BufferResponse(success=True, data={"data": items, "meta_info": meta_info})

    @app.post("/start_rollout")
    def start(data: Start) -> BufferResponse:
        try:
            buffer.start(data)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:
            return BufferResponse(success=False, message=str(error))
        return BufferResponse(success=True)

    return app


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8889)
    args = parser.parse_args(argv)
    uvicorn.run(create_app(RolloutBuffer(), args.host), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
