"""Brings published versions to an engine of somebody else's, by what that serves to everyone.

    with home_of(local) as home:
        follower = EngineFollower("s3://bucket/run7", engine, local, "of-engine-3", home=home)
        with follower:
            while True:
                follower.step()

It fetches, checks and makes a whole checkpoint while the engine generates, has it load that by SGLang's own
``/update_weights_from_disk``, and notes beside the versions what the engine then says that it serves.
"""

import logging
import math
import time
from pathlib import Path
from types import TracebackType

from slime.backends.sglang_utils.client import EngineError
from slime.utils.types import EngineEndpoint
from slime.weight_sync.presence import Presence
from slime.weight_sync.transports.session import CONFLICT, WriterClient
from slime.weight_sync.versions.board import Board, Follower, Published, edition_of
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import VersionManifest
from slime.weight_sync.writer import new_writer

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 5.0
_LONGEST_S = 60.0
FLUSH_S = 60.0
"""How long after an update in place it goes on to ask an engine to drop what older weights computed."""


class Replaced(RuntimeError):
    """Somebody else gives the engine weights since."""


class EngineFollower:
    """
    Args:
        place: of versions: a directory or a URL.
        engine: may be one of several processes behind one address.
        local: a directory on a disk of the engine's, by the same path for both.
        name: of this follower, which nobody else has.
        known_as: the engine's URL for trainers, where that is another one.
        timeout_s: of a request to the engine.
        home: what `home_of` says of ``local``; "" if this process does not hold it.

    Raises:
        ImportError, ValueError: nothing opens the URL of the place.
    """

    def __init__(
        self,
        place: str,
        engine: EngineEndpoint,
        local: Path,
        name: str,
        known_as: str | None = None,
        timeout_s: float = 600.0,
        home: str = "",
    ) -> None:
        self._board, self._local = Board(place), local
        self._endpoint, self._timeout_s = engine, timeout_s
        self._client = WriterClient(engine, timeout_s, new_writer())
        self._note = Follower(known_as or engine.url)
        self._presence = Presence(self._board, name, engine.url, home, self._note)
        self._is_told = False
        self._held: Published | None = None
        self._served: tuple[Path, Published] | None = None
        self._is_stopped = self._is_touched = False
        self._given = self._failures = 0
        self._flush_until = -math.inf
        self._again_at = 0.0
        self._warned = ""

    def __enter__(self) -> "EngineFollower":
        """Trainers know from now on that it lives.

        Raises:
            Taken: another follower has the engine, or the name.
            OSError: the place does not answer.
        """
        self._presence.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No trainer waits for this one any more."""
        self._presence.__exit__(kind, error, trace)

    def step(self) -> Published | None:
        """Looks once, and brings what is new; returns it if the engine serves it since.

        What fails is noted, and tried again: at once if another version is published, else after a while.
        The engine goes on meanwhile with what it had; if that cannot be had it computes nothing, and the
        note says so.

        Raises:
            Replaced: somebody else gives the engine weights; it is left to them.
            Taken: the same, told by another follower's note.
        """
        brought = None
        try:
            self._presence.require()
            found = self._board.newest()
            if found is not None and self._is_due(found[1]):
                brought = self._bring(*found)
            if not self._is_told:
                self._presence.tell(self._note)
                self._is_told = True
            self._flush()
        except OSError as error:
            self._warn(str(error))
        return brought

    def _is_due(self, published: Published) -> bool:
        if self._note.could_not(published):
            return time.monotonic() >= self._again_at
        if self._held is None or not self._note.has(published):
            return True
        try:
            return self._client.weight_version() != str(published.version)  # it was started again
        except EngineError as error:
            self._warn(str(error))
            return False

    def _bring(self, source: str, published: Published) -> Published | None:
        stage, why = "fetch", ""
        self._held, self._is_told = None, False
        self._is_stopped = self._is_touched = False
        try:
            path = self._staged(source, published)
            stage = "commit"
            self._commit(path, published)
        except (ValueError, OSError, EngineError) as error:
            why = self._failed(error)
        if why:
            self._warn(f"version {published.version}: {why}")
            self._note = Follower(self._note.engine, failed=edition_of(published), stage=stage, failure=why)
            return None
        self._held, self._served = published, (path, published)
        self._failures, self._warned = 0, ""
        return published

    def _failed(self, error: Exception) -> str:
        """Says why, and what became of the engine; has the next try wait for longer each time.

        Raises:
            Replaced: it failed as somebody else gives the engine weights.
        """
        if isinstance(error, EngineError) and error.status == CONFLICT:
            raise Replaced(str(error)) from error
        why = f"{error}{self._go_on() if self._is_stopped else ''}"
        pause = _TRY_AGAIN_S if self._is_stopped else _TRY_AGAIN_S * 2.0**self._failures
        self._failures = min(self._failures + 1, 16)
        self._again_at = time.monotonic() + min(pause, _LONGEST_S)
        return why

    def _go_on(self) -> str:
        """Has an engine that was stopped go on with what it had; says what became of it.

        Nobody knows what weights one has that did not take new ones: it loads the old ones again, if those
        are still here.

        Raises:
            Replaced: somebody else gives the engine weights since.
        """
        client, before = self._client, self._kept()
        if self._is_touched and before is None:
            return "; the engine stands still until it has a version: what it had is not here"
        try:
            client.take_weights()
            if self._is_touched and before is not None:
                client.update_weights_from_disk(str(before[0]), weight_version=str(before[1].version))
            client.continue_generation()
        except EngineError as error:
            if error.status == CONFLICT:
                raise Replaced(str(error)) from error
            return f"; the engine stands still until it has a version: {error}"
        self._is_stopped = False
        return "; the engine goes on with what it had"

    def _kept(self) -> tuple[Path, Published] | None:
        """The checkpoint that the engine had before, if it is still whole."""
        if self._served is None:
            return None
        path, published = self._served
        try:
            return self._served if VersionManifest.read(path).state == published.state else None
        except (ValueError, OSError):
            return None

    def _warn(self, text: str) -> None:
        """Says it once, however often it is tried again."""
        if text != self._warned:
            logger.warning("%s", text)
        self._warned = text

    def _staged(self, source: str, published: Published) -> Path:
        """A whole checkpoint of exactly these weights.

        Raises:
            ValueError, OSError: there is none; see `pull`.
        """
        kept = [] if self._served is None else [self._served[1].version]
        path = pull(source, self._local, published.version, self._timeout_s, kept)
        found = VersionManifest.read(path).state
        if found != published.state:
            raise ValueError(f"{path}: has state {found} (wanted: {published.state}, as is published)")
        return path

    def _commit(self, path: Path, published: Published) -> None:
        """
        Raises:
            EngineError: it did not answer, or refused.
            ValueError: it says that it serves something else.
        """
        client, version = self._taken(published.version), str(published.version)
        start = time.monotonic()
        client.commit_time = 0.0
        self._is_stopped = True
        client.pause_generation(published.pause_mode)
        held = published.pause_mode == "in_place" and not client.flush_idle_cache()
        if published.pause_mode != "in_place":
            client.flush_cache()
        self._is_touched = True
        client.update_weights_from_disk(str(path), weight_version=version)
        client.continue_generation()
        self._is_stopped = False
        self._flush_until = time.monotonic() + FLUSH_S if held else -math.inf
        pause = time.monotonic() - start
        if (found := client.weight_version()) != version:
            where = f"engine {client.endpoint.url}"
            raise ValueError(f"{where}: serves weight version {found!r} (wanted: {version!r})")
        self._note = Follower(
            self._note.engine, published.version, published.state, pause, client.commit_time
        )

    def _flush(self) -> None:
        """Has an engine whose requests were held over an update drop what older weights computed of them.

        It does once none is under way. Until then a prompt may go on from what it holds.
        """
        if self._flush_until == -math.inf:
            return
        try:
            if not self._client.flush_idle_cache():
                if time.monotonic() < self._flush_until:
                    return
                wanted = "--pause-generation-mode retract, or an engine without a prefix cache"
                why = f"has had requests for {FLUSH_S:g} s: it keeps prefixes of older weights"
                self._warn(f"engine {self._endpoint.url}: {why} (wanted: {wanted})")
        except EngineError as error:
            self._warn(str(error))
            return
        self._flush_until = -math.inf

    def _taken(self, version: int) -> WriterClient:
        """The engine takes weights from this follower; under another name if versions begin anew.

        Raises:
            EngineError: another one has come since.
        """
        self._client.take_weights()
        if version < self._given:
            self._client.close()
            self._client = WriterClient(self._endpoint, self._timeout_s, new_writer())
            self._client.take_weights()
        self._given = version
        return self._client
