"""One weight update from begin to end."""

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from slime.arguments.views import WeightSyncView
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.training.backend import HfTensors, NamedTensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement, wait_limit
from slime.weight_sync.filters.format import ServedFormat
from slime.weight_sync.filters.pairs import whole_pairs
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.handle import HandleTransport
from slime.weight_sync.transports.session import EngineClients
from slime.weight_sync.transports.transport import Transport

TRANSPORTS: dict[str, Callable[[WeightSyncView], Transport]] = {
    "handle": HandleTransport,
    "broadcast": BroadcastTransport,
}


def transport_names(args: WeightSyncView) -> tuple[str, ...]:
    """Handles reach engines on the trainer's GPUs, broadcasts those beyond them."""
    return ("handle", "broadcast") if args.colocate else ("broadcast",)


class WeightUpdate:
    """Sends the current weights to every connected engine. All methods run on every trainer rank.

    Engines are paused and their caches flushed before the first tensor arrives, and go on after the last.
    Each engine is served by the first transport that accepts it.

    Args:
        transports: default those of `transport_names`.
        served: the checkpoint directory that the engines were started with, in whose format they get the
            weights; without one as they are.
    """

    def __init__(
        self,
        args: WeightSyncView,
        weights: HfTensors,
        transports: Sequence[Transport] | None = None,
        served: str | None = None,
    ) -> None:
        self._args, self._weights = args, weights
        self._format = ServedFormat(served)
        if transports is None:
            transports = [TRANSPORTS[name](args) for name in transport_names(args)]
        self._transports = list(transports)
        self._ranks = RankAgreement(wait_limit(args))
        self._engines = EngineClients([], 0.0)
        self._check_pending = args.check_weight_update_equal
        self._interrupted = False

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines to be updated. ``endpoints`` must be the same on every rank.

        Raises:
            EngineError: an engine refused.
            RuntimeError: a group did not form in time, or another rank failed.
        """
        with self._ranks.step("connect engines"):
            self._engines.close()
            self._engines = EngineClients(endpoints, wait_limit(self._args).total_seconds())
            remaining = list(endpoints)
            for transport in self._transports:
                transport.connect([endpoint for endpoint in remaining if transport.accepts(endpoint)])
                remaining = [endpoint for endpoint in remaining if not transport.accepts(endpoint)]
            if remaining:
                raise ValueError(f"no transport reaches the engines {[e.url for e in remaining]}")
            if self._interrupted:
                self._check_pending = False  # what there was to compare with is gone
                self._on_main_rank(lambda: self._engines.each(_end_interrupted))
            self._interrupted = False

    def run(self, version: int) -> int:
        """Gives every engine the current weights under the version ``str(version)``.

        Returns:
            Bytes that this rank handed over.

        After a failure the engines that are left stay paused; connect again before the next update.

        Raises:
            EngineError: an engine refused or did not answer in time.
            RuntimeError: another rank failed.
        """
        self._interrupted = True  # until it is done
        with self._ranks.step("pause engines and open the update"):
            self._on_main_rank(self._open)
        with self._ranks.step("send weights"):
            sent = self._send_all(str(version))
        with self._ranks.step("close the update and continue"):
            self._on_main_rank(self._close)
        self._check_pending = self._interrupted = False
        return sent

    def disconnect(self) -> None:
        """Leaves all groups. It can be connected again."""
        with self._ranks.step("disconnect engines"):
            for transport in self._transports:
                transport.disconnect()
            self._engines.close()
            self._engines = EngineClients([], 0.0)

    def _on_main_rank(self, action: Callable[[], None]) -> None:
        if dist.get_rank() == 0:
            action()

    def _open(self) -> None:
        self._engines.each(lambda engine: engine.pause_generation())
        self._engines.each(lambda engine: engine.flush_cache())
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("reset_tensors"))
        self._engines.each(self._begin)

    def _begin(self, engine: EngineClient) -> None:
        engine.begin_weight_update()
        if self._format.needs_session and not engine.has_update_session:
            raise RuntimeError(
                f"engine {engine.endpoint.url}: has no /begin_weight_update, without which packed weights "
                "cannot be replaced (wanted: SGLang 0.5.23, or a checkpoint of another format)"
            )

    def _close(self) -> None:
        self._engines.each(lambda engine: engine.end_weight_update())
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("compare"))
        self._engines.each(lambda engine: engine.continue_generation())

    def _buckets(self) -> Iterator[NamedTensors]:
        return whole_pairs(self._weights.buckets(self._args.update_weight_buffer_size))

    def _send_all(self, version: str) -> int:
        """Bytes sent by this rank. Engines learn the version with the last bucket, when they are complete."""
        sources = set().union(*(transport.source_ranks() for transport in self._transports))
        if not sources & self._weights.ranks:
            return 0
        for transport in self._transports:
            transport.begin(version)
        sent, failure = 0, None
        for bucket, is_last in _with_last(self._buckets()):
            # After a failure go on gathering: the peers of this rank would wait for it otherwise.
            if failure is None and dist.get_rank() in sources:
                try:
                    stored = self._format.encode(bucket)
                    sent += sum(transport.send(stored, is_last) for transport in self._transports)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure
        for transport in self._transports:
            transport.finish()
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
