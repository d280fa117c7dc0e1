"""Weights as checkpoints in a directory, or an object store, that trainer and engines share."""

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.utils.deadlines import within
from slime.utils.misc import load_function
from slime.weight_sync.agreement import answer_limit
from slime.weight_sync.floor import probe_size
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.session import SessionTransport, WriterClient
from slime.weight_sync.versions.manifest import VersionManifest, directory_of
from slime.weight_sync.versions.staged import StagedVersion
from slime.weight_sync.versions.storage import storage_of

T = TypeVar("T")
_HOST = torch.device("cpu")


class DiskTransport(SessionTransport):
    """Trainer rank 0 writes a version while engines generate; they stand still only to load it.

    They do so by SGLang's own ``/update_weights_from_disk``, which needs no session. With
    ``--update-weight-local-checkpoint-dir`` each engine's machine makes a copy first. When all engines have
    confirmed a version the others may go. They do when the next one begins, which finds their memory warm:
    what has been free for a while may be given away, and takes longer to get than to write.
    """

    choice = "disk"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._answer_limit = answer_limit(config, loads_all=True)
        sync = config.weight_sync
        self._storage = storage_of(sync.update_weight_disk_dir or "")
        self._local = sync.update_weight_local_checkpoint_dir
        self._algorithm = sync.update_weight_delta_checksum
        self._keeps_files = sync.update_weight_disk_keep_files
        self._assets = Path(config.engines.synced_checkpoint)
        self._hook, self._args = sync.custom_update_weight_post_write_path, config.flat
        self._staged: StagedVersion | None = None
        self._served: int | None = None
        self._published: VersionManifest | None = None

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "full"

    @property
    def _writes(self) -> bool:
        """Whether this rank writes versions."""
        return bool(self._engines.endpoints)

    def path_speed(self) -> float:
        if not self._writes:
            return math.inf
        return self._on_disk(lambda: self._storage.speed(probe_size(self._bucket_bytes, _HOST)))

    def open(self, version: str, plan: WeightPlan) -> None:
        self._version, self._plan = version, plan
        if self._writes:
            self._staged = self._on_disk(self._stage)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._staged is None:
            return 0
        return self._on_disk(partial(self._staged.write, bucket))

    def commit(self) -> None:
        if self._staged is None or self._plan is None:
            return
        self._published = self._on_disk(partial(self._staged.publish, self._assets))
        self._tell_written()
        with self.spans.measure("fetch"):
            places = self._fetch()
        self._load(places)

    def resume(self) -> None:
        super().resume()
        if self._staged is not None:  # all engines have confirmed it, and go on meanwhile
            self._staged = None
            self._confirmed()

    def _stage(self) -> StagedVersion:
        if self._served is not None:
            self._storage.remove_others({self._served})
        return StagedVersion(self._storage, int(self._version), self._algorithm)

    def _tell_written(self) -> None:
        """Calls the user's function: the version is complete, and no engine has been asked to read it."""
        if self._hook is not None:
            load_function(self._hook)(self._args, self._written, list(self._engines.endpoints))

    @property
    def _written(self) -> str:
        """The directory of the version, or its URL."""
        return f"{self._storage.source}/{directory_of(Path(), int(self._version)).name}"

    def _fetch(self) -> dict[WriterClient, str]:
        """The directory that each engine is to load."""
        if self._local is None:
            return dict.fromkeys(self._engines.clients, self._written)
        body = {
            "local_checkpoint_dir": os.path.abspath(self._local),
            "source_dir": self._storage.source,
            "target_version": int(self._version),
        }
        pulled = self._engines.each(lambda engine: _pull(engine, body))
        return dict(zip(self._engines.clients, pulled, strict=True))

    def _load(self, places: Mapping[WriterClient, str]) -> None:
        """Has each engine stand still, and load the version from its directory."""
        assert self._plan is not None
        self._pause(self._version, self._plan)
        with self.spans.measure("apply"):
            self._engines.each(
                lambda engine: engine.update_weights_from_disk(places[engine], weight_version=self._version)
            )
        self._require_flushed()
        self._compare()

    def _confirmed(self) -> None:
        """All engines have loaded the version."""
        if self._keeps_files:
            return
        if self._served is None:  # what earlier runs have left
            self._on_disk(partial(self._storage.remove_others, {int(self._version)}))
        self._served = int(self._version)

    def _join(self) -> None:
        """
        Raises:
            DirectoryTaken: another trainer has come since.
            RuntimeError: the directory cannot be written.
        """
        if self._writes and self.writer is not None:
            self._access(partial(self._storage.take, self.writer))

    def _leave(self) -> None:
        self._staged = None

    def _on_disk(self, work: Callable[[], T]) -> T:
        """Does something to the directory, if it is still that of this trainer; see `_access`."""

        def require() -> None:
            if self.writer is not None:
                self._storage.require(self.writer)

        def own() -> T:
            require()
            try:
                return work()
            except OSError:
                require()  # or its files went with the trainer that came
                raise

        return self._access(own)

    def _access(self, work: Callable[[], T]) -> T:
        """
        Raises:
            DirectoryTaken: another trainer has come since.
            RuntimeError: the directory cannot be written, or does not answer in time.
        """
        try:
            return within(self._timeout.total_seconds(), f"access to {self._storage}", work)
        except TimeoutError as error:
            raise RuntimeError(
                f"--update-weight-disk-dir {self._storage}: {error} (wanted: a disk that answers within "
                "--distributed-timeout-minutes)"
            ) from error
        except OSError as error:
            raise RuntimeError(
                f"--update-weight-disk-dir {self._storage}: {error} (wanted: a place that can be written, "
                "with room for two versions of the weights)"
            ) from error


def _pull(engine: WriterClient, body: Mapping[str, Any]) -> str:
    """Has an engine's machine make a version a checkpoint of its own; returns where.

    The server does it, or the helper beside it that the endpoint names. It serves on meanwhile.
    """
    return str(engine.request("POST", f"{engine.endpoint.puller or ''}/pull_weights", body)["path"])
