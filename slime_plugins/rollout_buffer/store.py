"""Trajectories in one SQLite file, sorted into groups that are given out once.

A trajectory is written under its ``uid``: the same one again changes nothing, another one is refused. Those
of one ``instance_id`` form a group, until it is complete and given out; what comes later begins a new group.

A group is given out for good, or under a lease with a deadline. A lease has a name that its holder chose,
so that a question whose answer was lost can be asked again. A group that is acknowledged before the
deadline never comes again; any other one comes again after it.

Every change is one transaction: once a method has returned, a process that is killed and a machine whose
power fails lose nothing of it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime_plugins.rollout_buffer.answers import fitting_groups
from slime_plugins.rollout_buffer.room import BufferFull as BufferFull
from slime_plugins.rollout_buffer.room import Room
from slime_plugins.rollout_buffer.runs import NONE, Run
from slime_plugins.rollout_buffer.schema import (
    COMPLETE,
    FORGOTTEN,
    LEASED,
    OPEN,
    RETIRED,
    STATES,
    TAKEN,
    connect,
)
from slime_plugins.rollout_buffer.trajectory import version_range

Item = dict[str, Any]
"""A trajectory: uid, instance_id, messages, reward, extra_info, and of tokens what is known."""
Group = list[Item]


class UidTaken(ValueError):
    """Another trajectory was written under this uid."""


class LeaseLost(RuntimeError):
    """A lease cannot be used: it ran out, it was acknowledged, or there was none of its name."""


@dataclass(frozen=True)
class Added:
    """Where a trajectory went; ``size`` is that of its group."""

    new: bool
    group_id: int
    size: int


class Store:
    """The file. One thread uses it at a time, and several processes may open it.

    Args:
        max_waiting: trajectories that nobody has for good; no group is begun beyond that, while those that
            were begun are completed. Where all are of incomplete groups, the oldest of these is given up once
            it is idle (see `room`).
        keep: how many of the groups that were given out for good, or belong to an earlier start, keep their
            trajectories; None for all. Their uids stay.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        file: Path | str,
        max_waiting: int = 1_000_000,
        keep: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_waiting, self._keep, self._clock = max_waiting, keep, clock
        self._connection = connect(file)

    def close(self) -> None:
        self._connection.close()

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing; within another one, a part that can fail alone."""
        nested = self._connection.in_transaction
        begin, end, undo = (
            ("SAVEPOINT part", "RELEASE part", ("ROLLBACK TO part", "RELEASE part"))
            if nested
            else ("BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",))
        )
        self._connection.execute(begin)
        try:
            yield
            self._connection.execute(end)
        except BaseException:
            if self._connection.in_transaction:  # SQLite may have rolled back by itself, as on a full disk
                for statement in undo:
                    self._connection.execute(statement)
            raise

    def run(self) -> Run | None:
        """The latest one."""
        row = self._connection.execute("SELECT * FROM runs ORDER BY id DESC LIMIT 1").fetchone()
        return Run(*row) if row else None

    def begin_run(
        self, task_type: str, group_size: int, generator: str = NONE, owner: str | None = None
    ) -> Run:
        """An empty queue: groups of earlier runs are not given out any more, nor are their leases good."""
        with self.transaction():
            self._connection.execute(
                "UPDATE groups SET state = ?, lease = NULL WHERE state IN (?, ?, ?)",
                (RETIRED, OPEN, COMPLETE, LEASED),
            )
            self._connection.execute(
                "INSERT INTO runs (task_type, group_size, generator, waiting, owner) VALUES (?, ?, ?, 0, ?)",
                (task_type, group_size, generator, owner),
            )
            self._forget()
        return self.current()

    def set_generator(self, run: int, state: str) -> None:
        """Notes what became of the generator of a run."""
        with self.transaction():
            self._connection.execute("UPDATE runs SET generator = ? WHERE id = ?", (state, run))

    def uids(self) -> list[str]:
        """The uids of what was written in this run."""
        rows = self._connection.execute("SELECT uid FROM items WHERE run = ?", (self.current().id,))
        return [uid for (uid,) in rows]

    def add(self, item: Item, enough: int | None = None) -> Added:
        """Writes a trajectory, and completes its group if it has ``enough`` then.

        Raises:
            UidTaken: another one has its uid.
            BufferFull: it would begin a group, and too many wait.
        """
        body = orjson.dumps(item, option=orjson.OPT_SORT_KEYS)
        with self.transaction():
            run = self.current()
            if (earlier := self._earlier(run, item["uid"], body)) is not None:
                return earlier
            added = self._join(run, item["instance_id"], enough)
            self._insert(run, added.group_id, item, body)
            return added

    def current(self) -> Run:
        """The latest run.

        Raises:
            RuntimeError: there is none.
        """
        run = self.run()
        if run is None:
            raise RuntimeError("no run was begun")
        return run

    def _earlier(self, run: Run, uid: str, body: bytes) -> Added | None:
        found = self._connection.execute(
            "SELECT group_id, body, size FROM items JOIN groups ON groups.id = group_id"
            " WHERE run = ? AND uid = ?",
            (run.id, uid),
        ).fetchone()
        if found is None:
            return None
        group_id, written, size = found
        if written is not None and written != body:
            raise UidTaken(f"uid {uid}: another trajectory was written under it (wanted: a uid for each)")
        return Added(False, group_id, size)

    def _join(self, run: Run, instance_id: str, enough: int | None) -> Added:
        """The group of a new trajectory, which counts it."""
        found = self._connection.execute(
            f"SELECT id, state, size FROM groups WHERE instance_id = ? AND state IN ({OPEN}, {COMPLETE})",
            (instance_id,),
        ).fetchone()
        if found is None or found[1] == COMPLETE:
            room = Room(self._connection, self._clock())
            self._count(-room.for_group(instance_id, run.waiting, self._max_waiting))
        self._count(1)
        group_id, state, size = found or (None, OPEN, 0)
        if enough is not None and size + 1 >= enough:
            state = COMPLETE
        cursor = self._connection.execute(
            "INSERT INTO groups (id, instance_id, state, size) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET state = excluded.state, size = excluded.size RETURNING id",
            (group_id, instance_id, state, size + 1),
        )
        return Added(True, cursor.fetchone()[0], size + 1)

    def _count(self, items: int) -> None:
        """Notes that so many more trajectories wait."""
        self._connection.execute(
            "UPDATE runs SET waiting = waiting + ? WHERE id = (SELECT MAX(id) FROM runs)", (items,)
        )

    def _insert(self, run: Run, group_id: int, item: Item, body: bytes) -> None:
        oldest, newest = version_range(item)
        self._connection.execute(
            "INSERT INTO items (run, uid, group_id, task_type, reward, written, oldest_version,"
            " newest_version, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(run.id, item["uid"], group_id, item.get("task_type") or run.task_type, item["reward"]),
                *(self._clock(), oldest, newest, body),
            ),
        )

    def group(self, group_id: int) -> Group:
        """What was written of a group, in that order."""
        rows = self._connection.execute(
            "SELECT body FROM items WHERE group_id = ? AND body IS NOT NULL ORDER BY id", (group_id,)
        )
        return [orjson.loads(body) for (body,) in rows]

    def complete(self, group_id: int) -> None:
        """Lets a group be given out."""
        with self.transaction():
            self._connection.execute(
                "UPDATE groups SET state = ? WHERE id = ? AND state = ?", (COMPLETE, group_id, OPEN)
            )

    def take(
        self, most: int | None = None, lease: str | None = None, seconds: float = 0.0
    ) -> dict[str, Group]:
        """Gives out complete groups, the oldest first, at most one of an ``instance_id``.

        Args:
            most: how many; None for all. No more than fit in an answer.
            lease: a name of the caller's choice: they come again unless they are acknowledged within
                ``seconds``. The same name again gets the same groups, and as much time once more. Without
                one, the groups are given for good.

        Raises:
            LeaseLost: what this lease held was acknowledged.
        """
        now = self._clock()
        with self.transaction():
            held = self._held(lease, now) if lease is not None else []
            found = held or fitting_groups(self._connection, self._ready(now, most))
            state = TAKEN if lease is None else LEASED
            self._connection.executemany(
                "UPDATE groups SET state = ?, lease = ?, deadline = ? WHERE id = ?",
                [(state, lease, now + seconds, group_id) for group_id, _ in found],
            )
            groups = {instance_id: self.group(group_id) for group_id, instance_id in found}
            if lease is None:
                self._done(sum(map(len, groups.values())))
        return groups

    def _ready(self, now: float, most: int | None) -> list[tuple[int, str]]:
        """Groups and instances; a group whose lease ran out may have a younger one of its instance."""
        returned = self._of_state(f"state = {LEASED} AND deadline <= ?", -1, now)
        complete = self._of_state(f"state = {COMPLETE}", -1 if most is None else most + len(returned))
        oldest: dict[str, tuple[int, str]] = {}
        for group_id, instance_id in sorted([*returned, *complete]):
            oldest.setdefault(instance_id, (group_id, instance_id))
        return list(oldest.values())[:most]

    def _of_state(self, condition: str, most: int, *values: float) -> list[tuple[int, str]]:
        sql = f"SELECT id, instance_id FROM groups WHERE {condition} ORDER BY id LIMIT ?"
        return self._connection.execute(sql, (*values, most)).fetchall()

    def _held(self, lease: str, now: float) -> list[tuple[int, str]]:
        """What a lease that runs holds."""
        rows = self._of_lease(lease)
        held = [(group, name) for group, name, state, end, _ in rows if state == LEASED and end > now]
        if not held and any(state in (TAKEN, FORGOTTEN) for _, _, state, _, _ in rows):
            raise LeaseLost(f"lease {lease}: acknowledged already (wanted: a new name for new groups)")
        return held

    def _of_lease(self, lease: str) -> list[tuple[int, str, int, float, int]]:
        """Group, instance, state, deadline and size."""
        return self._connection.execute(
            "SELECT id, instance_id, state, deadline, size FROM groups WHERE lease = ? ORDER BY id", (lease,)
        ).fetchall()

    def end_leases(self, owner: str, but: str | None) -> None:
        """Lets what is held under leases of ``owner`` come again at once, but for those of one holder.

        Their names are ``owner.holder.``, and more.
        """
        kept = f"{owner}.{but}."
        with self.transaction():
            self._connection.execute(
                f"UPDATE groups SET deadline = 0 WHERE state = {LEASED}"
                " AND substr(lease, 1, ?) = ? AND substr(lease, 1, ?) <> ?",
                (len(owner) + 1, f"{owner}.", len(kept), kept),
            )

    def acknowledge(self, leases: Sequence[str]) -> None:
        """Gives for good what the leases hold, of all of them or of none; again, it changes nothing.

        Raises:
            LeaseLost: one has run out, or there was none of its name.
        """
        with self.transaction():
            for lease in leases:
                self._acknowledge(lease, self._clock())

    def _acknowledge(self, lease: str, now: float) -> None:
        rows = self._of_lease(lease)
        held = [(group, size) for group, _, state, end, size in rows if state == LEASED and end > now]
        if not held and not any(state in (TAKEN, FORGOTTEN) for _, _, state, _, _ in rows):
            raise LeaseLost(
                f"lease {lease}: it ran out, or nothing was given under it (wanted: one that runs)"
            )
        self._connection.executemany(
            "UPDATE groups SET state = ? WHERE id = ?", [(TAKEN, group) for group, _ in held]
        )
        self._done(sum(size for _, size in held))

    def _done(self, items: int) -> None:
        self._count(-items)
        self._forget()

    def _forget(self) -> None:
        """Deletes the trajectories of all but the latest groups that nobody waits for."""
        if self._keep is None:
            return
        surplus = self._connection.execute(
            "SELECT id FROM groups WHERE state IN (?, ?) ORDER BY id DESC LIMIT -1 OFFSET ?",
            (TAKEN, RETIRED, self._keep),
        ).fetchall()
        self._connection.executemany("UPDATE items SET body = NULL WHERE group_id = ?", surplus)
        self._connection.executemany(f"UPDATE groups SET state = {FORGOTTEN} WHERE id = ?", surplus)

    def counts(self) -> dict[str, int]:
        """How many groups there are of each state."""
        rows = self._connection.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")
        return dict.fromkeys(STATES, 0) | {STATES[state]: count for state, count in rows}
