"""One weight update from begin to end."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.update_weight.engines import EngineGroup
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator, NamedTensors
from slime.backends.megatron_utils.update_weight.ranks import RankAgreement, wait_limit
from slime.backends.megatron_utils.update_weight.sender import Sender
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.utils.types import EngineEndpoint


class WeightUpdater:
    """Sends the current weights to every connected engine. All methods run on every trainer rank.

    Engines are paused and their caches flushed before the first tensor arrives, and go on after the last.
    Each engine is served by the first of ``senders`` that accepts it.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module], senders: Sequence[Sender]) -> None:
        self._args = args
        self._senders = list(senders)
        self._weights = HfWeightIterator(args, model)
        self._ranks = RankAgreement(wait_limit(args))
        self._engines = EngineGroup([], 0.0)
        self._check_pending = bool(getattr(args, "check_weight_update_equal", False))
        self._interrupted = False

    def connect_rollout_engines(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines to be updated. ``endpoints`` must be the same on every rank.

        Raises:
            EngineError: an engine refused.
            RuntimeError: a group did not form in time, or another rank failed.
        """
        with self._ranks.step("connect engines"):
            self._engines.close()
            self._engines = EngineGroup(endpoints, wait_limit(self._args).total_seconds())
            remaining = list(endpoints)
            for sender in self._senders:
                sender.connect([endpoint for endpoint in remaining if sender.accepts(endpoint)])
                remaining = [endpoint for endpoint in remaining if not sender.accepts(endpoint)]
            if remaining:
                raise ValueError(f"no transport reaches the engines {[e.url for e in remaining]}")
            if self._interrupted:
                self._check_pending = False  # what there was to compare with is gone
                self._on_main_rank(lambda: self._engines.each(_end_interrupted))
            self._interrupted = False

    def update_weights(self, version: int) -> dict[str, float]:
        """Gives every engine the current weights under the version ``str(version)``.

        Returns:
            On every rank: seconds in total, and bytes that this rank handed over.

        After a failure the engines that are left stay paused; connect again before the next update.

        Raises:
            EngineError: an engine refused or did not answer in time.
            RuntimeError: another rank failed.
        """
        started = time.monotonic()
        self._interrupted = True  # until it is done
        with self._ranks.step("pause engines and open the update"):
            self._on_main_rank(self._open)
        with self._ranks.step("send weights"):
            sent = self._send_all(str(version))
        with self._ranks.step("close the update and continue"):
            self._on_main_rank(self._close)
        self._check_pending = self._interrupted = False
        return {"update_weights_time": time.monotonic() - started, "update_weights_bytes": float(sent)}

    def disconnect(self) -> None:
        """Leaves all groups. The updater can be connected again."""
        with self._ranks.step("disconnect engines"):
            for sender in self._senders:
                sender.disconnect()
            self._engines.close()
            self._engines = EngineGroup([], 0.0)

    def _on_main_rank(self, action: Callable[[], None]) -> None:
        if dist.get_rank() == 0:
            action()

    def _open(self) -> None:
        self._engines.each(lambda engine: engine.pause_generation())
        self._engines.each(lambda engine: engine.flush_cache())
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("snapshot"))
            self._engines.each(lambda engine: engine.weights_checker("reset_tensors"))
        self._engines.each(lambda engine: engine.begin_weight_update())

    def _close(self) -> None:
        self._engines.each(lambda engine: engine.end_weight_update())
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("compare"))
        self._engines.each(lambda engine: engine.continue_generation())

    def _send_all(self, version: str) -> int:
        """Bytes sent by this rank. Engines learn the version with the last bucket, when they are complete."""
        sources = set().union(*(sender.source_ranks() for sender in self._senders))
        if not sources.intersection(dist.get_process_group_ranks(mpu.get_model_parallel_group())):
            return 0
        sent, failure = 0, None
        for bucket, is_last in _with_last(self._weights.buckets(self._args.update_weight_buffer_size)):
            # After a failure go on gathering: the peers of this rank would wait for it otherwise.
            if failure is None:
                try:
                    sent += sum(sender.send(bucket, version if is_last else None) for sender in self._senders)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure
        return sent


def _end_interrupted(engine: EngineClient) -> None:
    """Ends the update that a failure left open; an engine that was started since then has none."""
    try:
        engine.end_weight_update()
    except EngineError as error:
        if error.status is None:
            raise


def _with_last(buckets: Iterator[NamedTensors]) -> Iterator[tuple[NamedTensors, bool]]:
    """Each bucket, and whether it is the last one."""
    previous = next(buckets, None)
    while previous is not None:
        following = next(buckets, None)
        yield previous, following is None
        previous = following
