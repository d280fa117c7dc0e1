"""Brings published versions to an engine of somebody else's, by what that serves to everyone.

    follower = EngineFollower("s3://bucket/run7", engine, local, "of-engine-3")
    while True:
        follower.step()

It fetches, checks and makes a whole checkpoint while the engine generates, has it load that by SGLang's own
``/update_weights_from_disk``, and notes beside the versions what the engine then says that it serves.
"""

import logging
import time
from pathlib import Path

from slime.backends.sglang_utils.client import EngineError
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports.session import CONFLICT, WriterClient
from slime.weight_sync.versions.board import Board, Follower, Published, edition_of
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import VersionManifest
from slime.weight_sync.writer import new_writer

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 5.0


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
    ) -> None:
        self._board, self._local, self._name = Board(place), local, name
        self._endpoint, self._timeout_s = engine, timeout_s
        self._client = WriterClient(engine, timeout_s, new_writer())
        self._note = Follower(known_as or engine.url)
        self._is_told = False
        self._held: Published | None = None
        self._given = 0
        self._again_at = 0.0
        self._warned = ""

    def step(self) -> Published | None:
        """Looks once, and brings what is new; returns it if the engine serves it since.

        What fails is noted, and tried again: at once if another version is published, else after a while.
        Until it succeeds an engine that was stopped for it computes nothing.

        Raises:
            Replaced: somebody else gives the engine weights; it is left to them.
        """
        brought = None
        try:
            found = self._board.newest()
            if found is not None and self._is_due(found[1]):
                brought = self._bring(*found)
            if not self._is_told:
                self._board.tell(self._name, self._note)
                self._is_told = True
        except OSError as error:
            self._warn(str(error))
        return brought

    def leave(self) -> None:
        """No trainer waits for this one any more."""
        self._board.forget(self._name)

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
        stage = "fetch"
        self._held, self._is_told = None, False
        try:
            path = self._staged(source, published)
            stage = "commit"
            self._commit(path, published)
        except (ValueError, OSError, EngineError) as error:
            if isinstance(error, EngineError) and error.status == CONFLICT:
                raise Replaced(str(error)) from error
            self._warn(f"version {published.version}: {error}")
            self._again_at = time.monotonic() + _TRY_AGAIN_S
            self._note = Follower(
                self._note.engine, failed=edition_of(published), stage=stage, failure=str(error)
            )
            return None
        self._held, self._warned = published, ""
        return published

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
        path = pull(source, self._local, published.version, self._timeout_s)
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
        client.pause_generation(published.pause_mode)
        if published.pause_mode == "in_place":
            client.flush_idle_cache()
        else:
            client.flush_cache()
        client.update_weights_from_disk(str(path), weight_version=version)
        client.continue_generation()
        pause = time.monotonic() - start
        if (found := client.weight_version()) != version:
            where = f"engine {client.endpoint.url}"
            raise ValueError(f"{where}: serves weight version {found!r} (wanted: {version!r})")
        self._note = Follower(
            self._note.engine, published.version, published.state, pause, client.commit_time
        )

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
