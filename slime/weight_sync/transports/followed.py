"""Changes in a directory or an object store for engines that followers bring them to."""

import logging
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient
from slime.config.weight_update import WeightUpdateConfig
from slime.utils.types import EngineEndpoint
from slime.utils.worker_url import spelling
from slime.weight_sync.agreement import wait_limit
from slime.weight_sync.transports.delta import DeltaTransport, is_followed
from slime.weight_sync.transports.followers import BACK_S, Followers
from slime.weight_sync.transports.session import EngineClients, WriterClient
from slime.weight_sync.versions.board import Board, Follower, Published, name_of

logger = logging.getLogger(__name__)

_PART_OF_LIMIT = 0.75  # before the other ranks give this one up
_LOOK_AGAIN_S = 0.05
_LONGEST_S = 1.0
_COMMAND = "slime weights follow"


class FollowedTransport(DeltaTransport):
    """Trainer ranks write versions as `DeltaTransport` does, and speak to no engine of them.

    Beside each engine a follower (`slime.weight_sync.follower`) stages what is published, has the engine load
    it, and notes what that then says it serves. The base moves on when every one has: of the engines of the
    run each needs a follower, which their own word has to confirm. Followers of other engines are waited for
    as well, while they live; one that does not come to the version is left behind, and finds all that it
    needs in the chain. Without any the chain goes on from what was published last.
    """

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._board = Board(config.weight_sync.update_weight_disk_dir or "")
        self._followers = Followers(self._board)
        self._limit_s = _PART_OF_LIMIT * wait_limit(config.cluster).total_seconds()
        self.publishes = config.weight_sync.publish_weights
        self._edition = 0
        self._check_pending = False
        self._deadline: float | None = None

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "delta" and is_followed(config)

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """The engines take weights from their followers: this trainer takes nothing but the directory."""
        self.disconnect()
        self._endpoints = list(endpoints)
        if dist.get_rank() == 0:
            self._engines = EngineClients(endpoints, self._answer_limit, selector=self._selector)
        self._join()

    def commit(self) -> None:
        """
        Raises:
            RuntimeError: a follower of one of the run's engines could not bring it, or there is none.
            EngineError: such an engine does not answer.
        """
        self._deadline = None
        super().commit()

    def _comes_whole(self) -> bool:
        """Announces the version, and waits for followers; see `DeltaTransport`."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._limit_s
        with self.spans.measure("follow"):
            return self._wait(self._announce(), self._deadline)

    def _load(self, places: Mapping[WriterClient, str]) -> None:
        """The followers have had their engines do so."""
        self._compare()

    def _go_on(self) -> None:
        """The followers have let their engines go on."""

    def _announce(self) -> Published:
        assert self._published is not None
        version, state = self._published.link
        self._edition += 1
        published = Published(version, state, self._edition, self.writer or "", self._pause_mode)
        self._on_disk(lambda: self._board.publish(self._storage.source, published))
        self._followers.announce(published)
        return published

    def _wait(self, published: Published, deadline: float) -> bool:
        """Returns when all followers have confirmed; the others than the run's own until the deadline.

        Returns:
            Whether one cannot make use of changes, so that they have to come whole.
        """
        pause, unsure = _LOOK_AGAIN_S, list(self._engines.clients)
        while True:
            followers = self._on_disk(self._followers.look)
            own = self._own(followers, published)
            unsure = [engine for engine in unsure if not _serves(engine, own, published)]
            behind = self._followers.behind(followers, published)
            if not unsure and not behind:
                break
            if self._cannot_use_changes(published, followers):
                return True
            self._require_able(published, own, unsure)
            able = [key for key in behind if not _could_not(followers[key], published)]
            if not able and not unsure:
                break
            if time.monotonic() >= deadline:
                self._require_followers(own, unsure)
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        self._followers.leave_behind(followers, published)
        if self._published is not None and self._published.base is not None:
            self._followers.took_changes(followers, published)
        known = [one for one in followers.values() if one is not None and one.has(published)]
        self.pause = max((one.pause for one in known), default=0.0)
        self.commit_time = max((one.commit for one in known), default=0.0)
        return False

    def _own(self, followers: dict[str, Follower | None], published: Published) -> dict[str, Follower]:
        """By the engine's address the followers of the run's own.

        Of several by one address one that could not bring the version comes before one that has, and that
        before those that say nothing of it: one that was killed, and came back by another name, left a note.
        """
        wanted = self._own_urls
        known = [one for one in followers.values() if one is not None]
        known.sort(key=lambda one: (one.could_not(published), one.has(published)))
        found = {spelling(one.engine): one for one in known}
        return {url: one for url, one in found.items() if url is not None and url in wanted}

    @property
    def _own_urls(self) -> set[str]:
        return {url for one in self._endpoints if (url := spelling(one.url)) is not None}

    def _cannot_use_changes(self, published: Published, followers: dict[str, Follower | None]) -> bool:
        """Whether a follower lacks what they build on, or they are damaged, and it is not set aside."""
        if self._published is None or self._published.base is None:
            return False
        unread = self._followers.unread(followers, published, self._own_urls)
        if not unread:
            return False
        one = followers[unread[0]]
        why = "" if one is None else one.failure
        logger.warning("version %s comes whole: %s: %s", self._version, name_of(unread[0]), why)
        return True

    def _require_able(
        self, published: Published, own: dict[str, Follower], unsure: Sequence[EngineClient]
    ) -> None:
        for engine in unsure:
            url = spelling(engine.endpoint.url) or ""
            one, gone = own.get(url), self._followers.gone(url)
            if one is not None and one.could_not(published):
                where = f"engine {engine.endpoint.url}: its follower could not {one.stage}"
                raise RuntimeError(f"{where} version {published.version}: {one.failure}")
            if one is None and gone is not None and gone[1] >= BACK_S:
                where = f"engine {engine.endpoint.url}: its follower {gone[0]} is gone, and none has come"
                raise RuntimeError(f"{where} within {BACK_S:g} s (wanted: the same `{_COMMAND}` again)")

    def _require_followers(self, own: dict[str, Follower], unsure: Sequence[EngineClient]) -> None:
        for engine in unsure:
            url = engine.endpoint.url
            where = f"engine {url}: version {self._version} was not confirmed within {self._limit_s:.0f} s"
            if spelling(url) not in own:
                told = f"{_COMMAND} {self._storage} --engine ... --known-as {url}"
                raise RuntimeError(f"{where}, and nothing follows for it (wanted: {told})")
            raise RuntimeError(f"{where} (see what its `{_COMMAND}` says)")


def _could_not(follower: Follower | None, published: Published) -> bool:
    return follower is not None and follower.could_not(published)


def _serves(engine: EngineClient, own: dict[str, Follower], published: Published) -> bool:
    """Whether its follower has confirmed, and it says the same itself.

    Raises:
        EngineError: it does not answer.
    """
    found = engine.weight_version()
    one = own.get(spelling(engine.endpoint.url) or "")
    return one is not None and one.has(published) and found == str(published.version)
