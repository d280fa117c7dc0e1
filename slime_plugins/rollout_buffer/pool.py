"""What was ever written, whether it was given out or not, asked for by task, reward, age and version."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, Field

from slime_plugins.rollout_buffer.answers import fitting_rows
from slime_plugins.rollout_buffer.schema import STATES, connect

MAX_ROWS = 1000


class Query(BaseModel, extra="forbid"):
    """Which trajectories; what is left out does not matter.

    Attributes:
        task_type: of the trajectory, or of the run that it was written in.
        instance_id: of its prompt.
        min_reward, max_reward: both ends count.
        min_age_s, max_age_s: seconds since it was written.
        min_version, max_version: no token was made by older, or newer, weights; those without a numbered
            version are left out then.
        before: only those with a smaller ``id``: the last one of the answer before, for the next page.
    """

    task_type: str | None = None
    instance_id: str | None = None
    min_reward: float | None = Field(None, allow_inf_nan=False)
    max_reward: float | None = Field(None, allow_inf_nan=False)
    min_age_s: float | None = Field(None, allow_inf_nan=False)
    max_age_s: float | None = Field(None, allow_inf_nan=False)
    min_version: int | None = Field(None, ge=0, lt=2**63)
    max_version: int | None = Field(None, ge=0, lt=2**63)
    before: int | None = Field(None, ge=0, lt=2**63)
    limit: int = Field(100, gt=0, le=MAX_ROWS)


_CONDITIONS = {
    "task_type": "task_type = ?",
    "instance_id": "instance_id = ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "min_version": "oldest_version >= ?",
    "max_version": "newest_version <= ?",
    "before": "items.id < ?",
}
_AGES = {"min_age_s": "written <= ?", "max_age_s": "written >= ?"}


class ExperiencePool:
    """Reads the file of a `Store` beside it, of what was committed; one thread at a time."""

    def __init__(self, file: Path | str, clock: Callable[[], float] = time.time) -> None:
        self._connection, self._clock = connect(file), clock

    def close(self) -> None:
        self._connection.close()

    def find(self, query: Query) -> list[dict[str, Any]]:
        """Newest first, as many as fit in an answer.

        Each has ``id``, ``state`` of the group, ``task_type``, ``written`` (epoch s) and ``item``.
        """
        asked, now = query.model_dump(exclude={"limit"}, exclude_none=True), self._clock()
        conditions = ["body IS NOT NULL", *({**_CONDITIONS, **_AGES}[name] for name in asked)]
        values = [now - value if name in _AGES else value for name, value in asked.items()]
        rows = self._connection.execute(
            "SELECT items.id, state, task_type, written, body FROM items JOIN groups ON groups.id = group_id"
            f" WHERE {' AND '.join(conditions)} ORDER BY items.id DESC LIMIT ?",
            (*values, query.limit),
        )
        with closing(rows):
            return [
                {
                    "id": id,
                    "state": STATES[state],
                    "task_type": task,
                    "written": written,
                    "item": orjson.loads(body),
                }
                for id, state, task, written, body in fitting_rows(rows)
            ]
