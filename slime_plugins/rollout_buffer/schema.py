"""The file of the rollout buffer: its tables, and how it is opened so that a commit outlives the machine."""

import errno
import fcntl
import os
import sqlite3
from pathlib import Path

APPLICATION_ID = 0x524F4C4C
"""Stands in the head of the file, as ``PRAGMA application_id``: which program's file it is."""
SCHEMA_VERSION = 2
"""Stands there as ``PRAGMA user_version``."""
SYNCHRONOUS = "FULL"
"""Flushes the log to the disk with each commit, not only now and then."""
BUSY_TIMEOUT_S = 60.0
"""How long a transaction waits for one of another process."""

OPEN, COMPLETE, LEASED, TAKEN, RETIRED, FORGOTTEN = range(6)
"""What becomes of a group. Retired: of an earlier start, or given up; forgotten: without trajectories."""
STATES = ("open", "complete", "leased", "acknowledged", "retired", "forgotten")

_TABLES = f"""
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    task_type TEXT NOT NULL,
    group_size INTEGER NOT NULL,
    generator TEXT NOT NULL, -- none, running, ended, stopped, or what ended it
    waiting INTEGER NOT NULL, -- trajectories that nobody has for good
    owner TEXT               -- the training run that started it
);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    instance_id TEXT NOT NULL,
    state INTEGER NOT NULL,
    size INTEGER NOT NULL,
    lease TEXT,
    deadline REAL            -- of the lease, seconds since 1970
);
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    uid TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    task_type TEXT NOT NULL,
    reward REAL NOT NULL,
    written REAL NOT NULL,   -- seconds since 1970
    oldest_version INTEGER,  -- of the weights that made its tokens
    newest_version INTEGER,
    body BLOB                -- JSON of the trajectory
);
CREATE UNIQUE INDEX open_groups ON groups (instance_id) WHERE state IN ({OPEN}, {COMPLETE});
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_lease ON groups (lease) WHERE lease IS NOT NULL;
CREATE UNIQUE INDEX items_by_uid ON items (run, uid);
CREATE INDEX items_by_group ON items (group_id);
CREATE INDEX items_by_time ON items (task_type, written);
"""
_SINCE = {1: "ALTER TABLE runs ADD COLUMN owner TEXT", SCHEMA_VERSION: ""}
"""What a file with tables of a version lacks."""


class UnknownFile(ValueError):
    """A file is none of a rollout buffer, or of one with other tables."""


class FileInUse(OSError):
    """Another process serves a file."""


def hold(file: Path | str) -> int:
    """A descriptor of ``file.lock``: until it is closed, or this process ends, no other one can have it.

    A lock of the process, which the workers that it forks do not have and so cannot keep after its death.

    Raises:
        FileInUse: another process has it.
        OSError: it can be neither read nor made.
    """
    descriptor = os.open(f"{file}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise FileInUse(
                f"{file}: another process serves it (wanted: its end, or another file)"
            ) from error
        raise
    return descriptor


def connect(file: Path | str) -> sqlite3.Connection:
    """A connection to ``file``, which is made if it is not there.

    The log is written ahead and flushed to the disk with each commit (``synchronous=FULL``): what was
    committed is there after the process was killed and after the power failed, if the disk keeps what it
    confirms. Not for network file systems, on which SQLite's log does not work.

    Raises:
        UnknownFile: it is something else.
        OSError: it can be neither read nor made.
    """
    _make(Path(file))
    connection = sqlite3.connect(
        Path(file).absolute(),
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        _prepare(connection, file)
    except BaseException:
        connection.close()
        raise
    return connection


def _make(file: Path) -> None:
    """Makes an empty file that is its owner's alone, and so its log, if there is none.

    One that is there is not opened: closing it would end the locks of all connections of this process to it,
    and another process that closes the file then takes its log away under them.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        if not file.is_file() or not os.access(file, os.R_OK | os.W_OK):
            raise PermissionError(f"{file}: no file to read and write") from None


def _prepare(connection: sqlite3.Connection, file: Path | str) -> None:
    """Makes the tables of a new file, or what an older one lacks, in one transaction; refuses other files."""
    try:
        _check(connection, file)
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        version = _check(connection, file)
        for statement in (_TABLES if not version else _SINCE[version]).split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise UnknownFile(f"{file}: {error} (wanted: a file of the rollout buffer, or none)") from error


def _check(connection: sqlite3.Connection, file: Path | str) -> int:
    """The version of the file's tables; 0 if it has none at all."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if not tables and not owner:
        return 0
    if owner != APPLICATION_ID:
        raise UnknownFile(f"{file}: the file of another program (wanted: one of the rollout buffer, or none)")
    if version not in _SINCE:
        raise UnknownFile(
            f"{file}: its tables are of version {version} (wanted: at most {SCHEMA_VERSION}; read it with "
            "the release that wrote it, or begin a new file)"
        )
    return int(version)
