"""Trainer ranks: the product's worker and weight update, with a model of a few numbers, and gloo's like."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from slime.ray.train_worker import TrainRayActor
from slime.training.backend import Start
from slime.training.save_attempts import Outcome
from slime.training.weights import NamedTensors, TensorInfo
from slime.weight_sync.transports.session import SessionTransport
from tests.simulation.kernel import Waiters


class Weights:
    """Tensors of one number each: the number of the training state."""

    rounding = 0.0

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend
        self.ranks = frozenset(range(backend.sim.plan.ranks))

    def manifest(self) -> list[TensorInfo]:
        return [TensorInfo(f"piece.{n}", (1,), torch.float32) for n in range(self._backend.sim.plan.pieces)]

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        for info in self.manifest():
            self._backend.sim.world.sleep(0.4 * self._backend.sim.world.rng.random())
            yield [(info.name, torch.tensor([float(self._backend.state)]))]


class Backend:
    """A model whose training state is a number."""

    sim: Any = None

    def __init__(self, args: Any, role: str) -> None:
        self.state, self.device = 0, torch.device("cpu")
        nothing = lambda *arguments: None
        self.memory = SimpleNamespace(require_all=nothing, require_weights=nothing)
        self.poll = self.require_finite = nothing
        self._args = args

    def load(self) -> Start:
        self.sim.world.sleep(self.sim.world.rng.uniform(0.5, 10.0))
        found = self.sim.disk.checkpoint()
        if found is None:
            return Start()
        rollout_id, self.state, common = found
        return Start(rollout_id + 1, common)

    def save(self, rollout_id: int, common: Mapping[str, Any], tags: list[str], wait: bool) -> list[Outcome]:
        self.sim.world.sleep(self.sim.world.rng.random())
        self.sim.gloo.meet("save")
        self.sim.disk.checkpoints[rollout_id] = self.state, dict(common)
        return [None]

    def weights(self, form: str = "full") -> Weights:
        return Weights(self)

    def parallel_config(self) -> dict[str, int]:
        sizes = {"dp_size": self._args.world_size, "cp_size": 1, "vpp_size": 1}
        return sizes | {"microbatch_group_size_per_vp_stage": 1, "dp_rank": self._args.rank}


class SimTrainActor(TrainRayActor):
    """In place of `TrainRayActor`, which would compute on the shard."""

    sim: Any = None

    def train_shard(self, rollout_id: int, shard: Any, inputs: Any = None) -> tuple[dict[str, Any], Any]:
        sim = self.sim
        sim.rules.trains(rollout_id, self._config.cluster.rank, self._weight_version, shard)
        self._trained_since_update = True
        sim.world.sleep(sim.world.rng.uniform(0.2, 8.0))
        sim.gloo.meet("optimizer step")
        self.backend.state = rollout_id + 1
        return {}, SimpleNamespace(outputs=None)

    def process_ended(self) -> None:
        self.sim.gloo.lost()


class SimTransport(SessionTransport):
    """Carries weights to engines that have joined its group; all else is the product's.

    A tensor's shape tells the number in it: it comes with the announcement.
    """

    sim: Any = None
    _group = ""

    def open(self, version: str, plan: Any) -> None:
        self.sim.rules.sends(int(version))
        super().open(version, plan)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        ((name, tensor),) = bucket
        piece, state = name.removeprefix("piece."), int(tensor)
        version = self._version if is_last else None
        self._engines.each(
            lambda client: client.update_weights_from_distributed(
                [piece], ["float32"], [[state]], self._group, weight_version=version
            )
        )
        return tensor.nbytes

    def _join(self) -> None:
        self._group = group = f"group {next(self.sim.ports)}"
        self._engines.each(lambda client: client.init_weights_update_group("", 1, 1, 2, group))

    def _leave(self) -> None:
        if group := self._group:
            self._engines.each(lambda client: client.destroy_weights_update_group(group))


class Gloo:
    """``torch.distributed`` of the trainer ranks, as far as a weight update uses it."""

    def __init__(self, sim: Any) -> None:
        self._sim, self._world = sim, sim.world
        self._met: dict[Any, dict[int, Any]] = {}
        self._counts: dict[Any, int] = {}
        self._bells: list[Waiters] = []
        self._lost = False

    def get_rank(self) -> int:
        return self._world.current.process.instance._config.cluster.rank

    def get_world_size(self) -> int:
        return self._sim.plan.ranks

    def new_group(self, backend: str, timeout: Any) -> Any:
        return timeout.total_seconds()

    def all_gather_object(self, outcomes: list[Any], own: Any, group: float) -> None:
        outcomes[:] = self.meet("agreement", own, group)

    def meet(self, what: str, own: Any = None, timeout: float = 600.0) -> list[Any]:
        """What each rank has brought; returns when all have."""
        rank, size = self.get_rank(), self.get_world_size()
        number = self._counts[what, rank] = self._counts.get((what, rank), 0) + 1
        met = self._met.setdefault((what, number), {})
        met[rank] = own
        deadline = self._world.now + timeout
        while len(met) < size:
            if self._lost:
                raise RuntimeError("gloo: connection closed by peer")
            if self._world.now >= deadline:
                raise RuntimeError("gloo: timed out")
            bell = Waiters()
            self._bells.append(bell)
            self._world.block(f"other ranks: {what}", deadline - self._world.now, bell)
        self._ring()
        return [met[n] for n in range(size)]

    def lost(self) -> None:
        self._lost = True
        self._ring()

    def _ring(self) -> None:
        bells, self._bells = self._bells, []
        for bell in bells:
            self._world.wake_all(bell)
