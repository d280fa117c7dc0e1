"""Room for a new group in a full file, made of groups that nobody goes on with."""

import logging
import sqlite3

from slime_plugins.rollout_buffer.schema import COMPLETE, LEASED, OPEN, RETIRED

logger = logging.getLogger(__name__)
IDLE_S = 1800.0
"""A group that got no trajectory for so long is never completed. Longer than episodes are."""


class BufferFull(RuntimeError):
    """Too many trajectories wait for this one to begin a group."""


class Room:
    """Makes room in a file.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection, self._now = connection, now

    def for_group(self, instance_id: str, waiting: int, most: int) -> int:
        """Gives up what nobody will complete, where too many trajectories wait and no reader can take any.

        Returns:
            How many trajectories were given up; they stay in the file for queries.

        Raises:
            BufferFull: there is no room for another group.
        """
        given_up, told = 0, list[str]()
        can_be_fetched = waiting >= most and self._can_be_fetched()
        while waiting - given_up >= most:
            size = 0 if can_be_fetched else self._give_up_oldest(told)
            if not size:  # whoever asked undoes what was done so far
                why = "" if can_be_fetched else ", all of groups that are not complete"
                raise BufferFull(
                    f"{waiting} trajectories wait{why} (wanted: fewer than {most} before group {instance_id} "
                    "gets another)"
                )
            given_up += size
        for line in told:
            logger.warning(line)
        return given_up

    def _can_be_fetched(self) -> bool:
        """Whether readers can make room, now or once a lease has run out."""
        sql = f"SELECT 1 FROM groups WHERE state IN ({COMPLETE}, {LEASED}) LIMIT 1"
        return self._connection.execute(sql).fetchone() is not None

    def _give_up_oldest(self, told: list[str]) -> int:
        """How many trajectories the oldest incomplete group had; 0 unless it is idle."""
        found = self._connection.execute(
            "SELECT groups.id, instance_id, size, MAX(written) FROM groups JOIN items ON group_id = groups.id"
            f" WHERE groups.id = (SELECT MIN(id) FROM groups WHERE state = {OPEN}) GROUP BY groups.id"
        ).fetchone()
        if found is None or self._now - found[3] < IDLE_S:
            return 0
        group_id, instance_id, size, written = found
        self._connection.execute(f"UPDATE groups SET state = {RETIRED} WHERE id = ?", (group_id,))
        told.append(
            f"group {instance_id} is given up: too many trajectories wait, and none was added to its {size} "
            f"for {self._now - written:.0f} s"
        )
        return int(size)
