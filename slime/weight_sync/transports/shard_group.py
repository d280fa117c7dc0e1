"""Weights over a process group to engines elsewhere, each of whose ranks gets what it keeps alone."""

import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors, ShardedWeights
from slime.utils.tensor_bucket import FlatBuffer
from slime.weight_sync.agreement import peer_limit
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.proof import Digests, require_ranks_hold
from slime.weight_sync.shards.outgoing import OutgoingPieces
from slime.weight_sync.shards.pieces import kind_of, of_kind
from slime.weight_sync.transports import engine_group
from slime.weight_sync.transports.session import SessionTransport, WriterClient

_REASON_S = 5.0
"""How long an engine that has ended a message has to say why."""


class Outgoing(NamedTuple):
    """Bytes for all engine ranks of a kind."""

    kind: int
    data: torch.Tensor


class ShardGroupTransport(SessionTransport):
    """All trainer ranks, then the ranks of each engine in turn. Messages go from one of them to one other.

    Engines are told once what they will get of whom. For an update rank 0 asks each of them to receive all of
    it, which it does as fast as they send: one bucket is taken in while the next one is on its way. SGLang
    knows only what one rank broadcasts to all.

    Whoever fails closes its connections, by which the others learn of it.
    """

    choice = "shards"
    buckets_at_once = 2

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._limit = peer_limit(config)
        self._pieces: OutgoingPieces | None = None
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._sent: list[Digests] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._buffers = [FlatBuffer() for _ in range(self.buckets_at_once)]
        self._turn = 0
        self._prepared: list[Outgoing] | None = None
        self._under_way: list[dist.Work] = []
        self._received: list[Future[None]] = []

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return not config.cluster.colocate

    def shards_of(self, weights: ShardedWeights, timeout: timedelta) -> OutgoingPieces:
        self._pieces = OutgoingPieces(weights, timeout)
        return self._pieces

    def source_ranks(self) -> set[int]:
        return set(range(dist.get_world_size()))

    def path_speed(self) -> float:
        return engine_group.path_speed(self._endpoints, self._bucket_bytes)

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        self._prepared = self._packed(bucket)
        return False

    def open(self, version: str, plan: WeightPlan) -> None:
        super().open(version, plan)
        body = {"group_name": self._group_name}

        def receive(engine: EngineClient) -> None:
            engine.update("/update_weights_from_ranks", body, version)

        self._received = self._engines.begin(receive)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._group is None:
            return 0
        before, sent = self._under_way, 0
        self._under_way = []
        try:
            packed, self._prepared = self._prepared or self._packed(bucket), None
            self._turn = (self._turn + 1) % self.buckets_at_once
            for member, data in self._addressed(packed):
                self._under_way.append(self._group.send([data], member, 0))
                sent += data.nbytes
            _await_all(before)  # whose memory is that of the next one
        except Exception as error:
            with engine_group.naming_broken(self._group_name):
                self._give_up(before, error)
                raise
        return sent

    def settle(self) -> None:
        """
        Raises:
            EngineError: an engine refused, or did not answer in time.
            GroupBroken: connections of the group have ended.
            RuntimeError: one that this rank sends to did not take it in time.
        """
        try:
            _await_all(self._under_way)
            engine_group.await_answers(self._received, self._group_name, self._timeout)
        except Exception as error:
            with engine_group.naming_broken(self._group_name):
                self._give_up([], error)
                raise
        self._turn = 0

    def commit(self) -> None:
        """
        Raises:
            RuntimeError: an engine's rank holds other numbers than were sent, under
                ``--check-weight-checksums``.
        """
        self._sent = self._digests_of_all()  # before anything that fails on rank 0 alone
        super().commit()

    def _packed(self, bucket: NamedTensors) -> list[Outgoing]:
        """What goes to each kind, in memory that no message is sent from now."""
        data, found, start = self._buffers[self._turn].flatten(bucket).flattened_tensor, [], 0
        for kind, pieces in itertools.groupby(bucket, lambda piece: kind_of(piece[0])):
            end = start + sum(tensor.nbytes for _, tensor in pieces)
            found.append(Outgoing(kind, data[start:end]))
            start = end
        return found

    def _addressed(self, packed: Sequence[Outgoing]) -> list[tuple[int, torch.Tensor]]:
        """Members of the group, and what each gets."""
        assert self._pieces is not None
        by_kind, first = dict(packed), dist.get_world_size()
        kinds = enumerate(self._pieces.kinds, first)
        return [(member, by_kind[kind]) for member, kind in kinds if kind in by_kind]

    def _give_up(self, before: list[dist.Work], error: Exception) -> None:
        """Leaves the group, and has the others notice.

        Raises:
            EngineError: the reason of an engine, if it gives one.
        """
        works = [*before, *self._under_way]
        for each in (before, self._under_way):
            each.clear()  # the traceback of a failure would keep them, and they the group's connections
        # An engine that is gone is known by now, and one that has refused has said so.
        wait(self._received, _REASON_S, return_when=FIRST_EXCEPTION)
        reason = engine_group.failure_of(self._received, self._group_name, limit=0.0)
        group, self._group = self._group, None
        engine_group.abandon(group, works)
        del group, works
        if reason is not None and reason is not error:
            raise reason from error

    def _require_held(self, plan: WeightPlan, engines: Sequence[EngineClient]) -> None:
        if not engines or self._pieces is None:
            return
        kinds, sent = iter(self._pieces.kinds), []
        for engine in engines:
            own = itertools.islice(kinds, engine.endpoint.num_gpus)
            sent.append([of_kind(self._sent, kind) for kind in own])
        require_ranks_hold(engines, sent, {"action": "checksum", "pieces_of": self._group_name})

    def _join(self) -> None:
        """
        Raises:
            EngineError: an engine refused what it will be sent, or to join.
            RuntimeError: the group did not form in time, or another rank failed.
        """
        if not self._endpoints:
            return
        meeting = None
        with self.agreement.step("tell engines what they will be sent"):
            if self._engines.clients:
                meeting = engine_group.new_meeting(self._endpoints, dist.get_world_size())
                self._tell(meeting.name)
        meeting = self.agreement.of_first("where to meet engines", meeting)
        assert meeting is not None
        self._group_name = meeting.name
        self._group = engine_group.join_engines(meeting, dist.get_rank(), self._engines, self._limit)

    def _tell(self, group: str) -> None:
        assert self._pieces is not None
        sizes = [endpoint.num_gpus for endpoint in self._endpoints]
        firsts = dict(zip(self._engines.clients, itertools.accumulate(sizes, initial=0), strict=False))
        size = max(self._bucket_bytes // self.buckets_at_once, 1)
        plans = {
            kind: [[one.as_json() for one in messages] for messages in self._pieces.messages(kind, size)]
            for kind in set(self._pieces.kinds)
        }

        def tell(client: WriterClient) -> None:
            kinds = self._kinds_from(firsts[client], client.endpoint.num_gpus)
            _plan(client, {"group_name": group, "ranks": [plans[kind] for kind in kinds]})

        self._engines.each(tell)

    def _kinds_from(self, first: int, count: int) -> list[int]:
        assert self._pieces is not None
        return self._pieces.kinds[first : first + count]

    def _leave(self) -> None:
        if name := self._group_name:
            self._engines.each(lambda client: client.destroy_weights_update_group(name))
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._group_name, self._sent = None, "", []
        self._begin_anew()


def _plan(client: WriterClient, body: dict[str, Any]) -> None:
    try:
        client.request("POST", "/plan_weights_from_ranks", body)
    except EngineError as error:
        if error.status != 404:
            raise
        raise RuntimeError(
            f"engine {client.endpoint.url}: knows only weights that one rank broadcasts to all (wanted: the "
            "embedded engine, or --update-weight-transport nccl)"
        ) from error


def _await_all(works: list[dist.Work]) -> None:
    while works:
        works[0].wait()
        works.pop(0)
