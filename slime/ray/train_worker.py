"""One trainer process: a backend, the trainer of its role, and the way of its weights to the engines."""

import gc
import os
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray

from slime.arguments.core.runtime_context import with_context
from slime.config.run import run_config
from slime.config.trainers import trainer_of
from slime.models import calculate_fwd_flops
from slime.observability.gpu_use import device_peak, memory_metrics
from slime.observability.logging_utils import take_logged
from slime.observability.memory_history import MemoryHistory
from slime.observability.profiling import profiled
from slime.observability.slow_ranks import spans_alone
from slime.observability.spans import Span
from slime.observability.startup import reached
from slime.observability.timer import Timer
from slime.observability.train_metric_utils import perf_metrics
from slime.ray.local_gpu import local_gpu
from slime.ray.node import node_host
from slime.ray.process_watch import ProcessLocation, process_location
from slime.ray.snapshot_place import loading_on_this_host, on_this_host, require_snapshots_seen
from slime.training.backend import TrainBackend
from slime.training.checkpoint_errors import CheckpointError
from slime.training.metrics import rollout_metrics
from slime.training.micro_batches import tensorize
from slime.training.passes import needs_reference, needs_teacher
from slime.training.probe import text_log_probs
from slime.training.roles import ACTOR, ROLES
from slime.training.save_attempts import Outcome
from slime.training.staleness import staleness_metrics
from slime.training.tenants import Tenants
from slime.training.trainer import Trained, Trainer
from slime.training.versions import OLD_ACTOR, REFERENCE, ROLLOUT_ACTOR, TEACHER, TRAINED
from slime.training.weights import ADAPTER, BASE
from slime.utils.accelerator import empty_cache
from slime.utils.misc import load_function
from slime.utils.reserved_ports import reserve_port
from slime.utils.types import EngineEndpoint, RolloutBatch
from slime.weight_sync.report import SyncReport
from slime.weight_sync.update import AdapterWeights, WeightUpdate


class TrainWorker:
    """One rank of a role, in the process group that RANK, WORLD_SIZE and MASTER_* describe.

    The methods are collective over all ranks.
    """

    def __init__(self, args: Namespace, role: str = "actor") -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = run_config(with_context(args, rank=rank, world_size=world_size))
        self._config = loading_on_this_host(own)
        self._role = ROLES[role]
        self._timer = Timer()
        self._update: WeightUpdate | None = None
        self._trained_since_update = False
        self._takes_over = self._were_sent = False
        self._tenants: Tenants | None = None

    def start(self) -> int:
        """Builds and loads the model.

        Returns:
            The rollout id to start from.
        """
        require_snapshots_seen(self._config.fault_tolerance.trainer_snapshots, self._config.cluster.rank)
        self.backend: TrainBackend = load_function(trainer_of(self._config.trainer).backend)(
            self._config.flat, self._role.name
        )
        start = self.backend.load()
        name = f"memory_{self._role.name}_rank_{self._config.cluster.rank}"
        self._history = MemoryHistory(self._config.profiling, name)
        self._weight_version = int(start.common.get("weight_version", 0))
        self._trained_steps = start.common.get("trained_steps")
        self._load_versions()
        self._trainer = Trainer(self._config, self._role, self.backend, self._timer)
        return start.rollout_id

    def _load_versions(self) -> None:
        """The weights beside the trained ones."""
        config, backend = self._config, self.backend
        if needs_reference(self._config):
            backend.load_version(
                REFERENCE, config.kl.ref_load or config.hf_checkpoint.hf_checkpoint, config.kl.ref_ckpt_step
            )
        if needs_teacher(self._config) and config.distillation.opd_teacher_load:
            backend.load_version(
                TEACHER, config.distillation.opd_teacher_load, config.distillation.opd_teacher_ckpt_step
            )
        if config.off_policy.keep_old_actor:
            for tag in (TRAINED, OLD_ACTOR, ROLLOUT_ACTOR):
                backend.versions.backup(tag)

    def parallel_config(self) -> dict[str, int]:
        """What splitting a rollout over the ranks needs to know, and this rank's share of it."""
        return self.backend.parallel_config()

    def train_shard(
        self, rollout_id: int, shard: RolloutBatch, inputs: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Trained]:
        """Trains on this rank's shard of a rollout.

        Args:
            inputs: what another role has computed for the shard's samples.

        Returns:
            On the main rank {"train": metrics of each optimizer step, "rollout": metrics of the batch,
            "perf": seconds and throughput}, empty elsewhere; and the outcome.
        """
        self.backend.memory.require_all("train")
        self.backend.poll()
        version = self._version_of_weights()
        self._trained_since_update = True
        overall = profiled(self._config.profiling, "train_overall", rollout_id, self._role.prefix)
        with overall, self._timer.measure("train"):
            with self._timer.measure("data_preprocess"):
                batch = tensorize(shard, self.backend.device)
            trained = self._trainer.train(rollout_id, batch, inputs)
        seconds = self._timer.take()
        context = self.backend.context
        rollout = take_logged("rollout", "eval")  # on every rank, or it would wait for ever
        self._history.after(rollout_id)
        memory = memory_metrics(self.backend.device, self._role.prefix)
        if not context.is_last_stage:
            return {}, trained
        if self._role is ACTOR:
            seen = rollout_metrics(batch, sum(batch["global_batch_sizes"]), context.dp_group)
            rollout |= trained.policy | seen
        if version is not None:
            rollout |= staleness_metrics(batch, version, context.dp_group)
        lengths = shard["total_lengths"]
        flops = calculate_fwd_flops(lengths, self._config.model)
        seconds = {self._role.prefix + name: value for name, value in seconds.items()}
        peak = device_peak(self.backend.device)
        perf = perf_metrics(seconds, flops, sum(lengths), self._config.cluster.world_size, peak) | memory
        report = {"train": trained.steps, "rollout": rollout, "perf": perf} if context.is_main else {}
        return report, trained

    def _version_of_weights(self) -> int | None:
        """What the weights are as they would be sent; None in a run whose engines, if any, never got some."""
        if self._update is None and not self._were_sent:
            return None
        return self._weight_version + self._trained_since_update

    def trained_steps(self) -> int | None:
        """Optimizer steps of the run before this start; None if the checkpoint, if any, does not say."""
        return self._trained_steps

    def save_model(
        self,
        rollout_id: int,
        force_sync: bool = False,
        trained_steps: int | None = None,
        memory: str | None = None,
    ) -> list[Outcome]:
        """Writes a checkpoint of iteration ``rollout_id``, and the Hugging Face copy if it is asked for.

        Args:
            trained_steps: optimizer steps of the run so far, for the run that goes on with it.
            memory: where a snapshot is written in place of both.

        Returns:
            The outcomes of saves that are known now, the same on every rank.
        """
        with self._timer.spans.measure("save_model" if memory is None else "snapshot", rollout=rollout_id):
            return self._save_model(rollout_id, force_sync, trained_steps, memory)

    def _save_model(
        self, rollout_id: int, force_sync: bool, trained_steps: int | None, memory: str | None
    ) -> list[Outcome]:
        config = self._config
        self.backend.memory.require_all("save_model")
        self.backend.require_finite(f"saving rollout {rollout_id}")
        moving = needs_reference(config) and config.kl.ref_update_interval is not None
        common = {"weight_version": self._weight_version, "trained_steps": trained_steps}
        state = rollout_id, common, [REFERENCE] if moving else []
        if memory is not None:
            return self.backend.save(*state, wait=True, memory=on_this_host(memory))
        outcomes = self.backend.save(*state, wait=force_sync) if config.checkpoints.save else []
        if config.checkpoints.save_hf:
            try:
                self.backend.save_hf(config.checkpoints.save_hf.format(rollout_id=rollout_id))
            except CheckpointError as error:
                if not error.everywhere:
                    raise
                # A save of which a part failed has failed.
                return [*filter(None, outcomes), str(error)]
        return outcomes if config.checkpoints.save else [None]

    def connect_rollout_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Prepares weight sync with these engines, in place of those before."""
        if self._update is None:
            served = self._config.engines.synced_checkpoint
            lora, weights = self._config.lora, self.backend.weights
            named = dict(zip(lora.served_adapters, lora.each_adapter, strict=lora.serves_adapter))
            of_adapter = self._tenants.sent if self._tenants else partial(weights, ADAPTER)
            beside = [AdapterWeights(of_adapter(own), lora, name) for name, own in named.items()]
            whole, spans = weights(BASE) if beside else weights(), self._timer.spans
            self._update = WeightUpdate(self._config, whole, served=served, spans=spans, adapters=beside)
            if self._takes_over:
                self._update.take_over()
        self._update.connect(endpoints)

    def serve_tenants(self) -> None:
        """Before the first `connect_rollout_engines`: adapters train and are sent each when that is asked."""
        self._tenants = Tenants(self._config, self.backend, self._config.cluster.rank)

    def tenant(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `slime.training.tenants.Tenants`."""
        self.backend.memory.require_all(method)
        return getattr(self._tenants, method)(*arguments)

    def go_on(self, version: int, torn: bool) -> None:
        """Takes the place of ranks that were lost: versions of the weights go on from theirs.

        Args:
            version: what the engines were sent last; 0 if nothing.
            torn: whether the update after that ended half-way: some of them may have its version.
        """
        self._weight_version = max(self._weight_version, version) + torn
        self._takes_over, self._were_sent = True, version > 0

    def take_spans(self) -> list[Span]:
        """Returns what this rank did when, since the last call or training."""
        return self._timer.spans.take()

    def update_weights(self) -> tuple[int, SyncReport]:
        """Sends the weights to the connected engines.

        Returns:
            Their new version, and what the update took on this rank.

        Raises:
            RuntimeError: no engines were connected, the weights are offloaded, or they hold NaN or infinity.
        """
        self.backend.memory.require_weights("update_weights")
        self.backend.require_finite("giving the engines the weights")
        if self._update is None:
            raise RuntimeError("update_weights before connect_rollout_engines")
        with self._timer.spans.measure("update_weights", version=self._weight_version + 1):
            report = self._update.run(self._weight_version + 1)
        self._weight_version += 1
        self._trained_since_update = False
        if self._config.off_policy.keep_old_actor:
            self.backend.versions.backup(ROLLOUT_ACTOR)
        return self._weight_version, report

    def follow_engines(self) -> None:
        """The rollout that is trained on next is made with the weights that were sent last."""
        self.backend.versions.copy(src_tag=ROLLOUT_ACTOR, dst_tag=OLD_ACTOR)

    def text_log_probs(self, tokens: list[int], adapter: str | None = None) -> list[float] | None:
        """What the policy says of a text; None on ranks that do not know.

        Args:
            adapter: whose policy, of several.
        """
        self.backend.memory.require_weights("text_log_probs")
        if adapter is not None:
            self.backend.select(adapter)
        return text_log_probs(self._config.logits, self.backend, tokens)

    def offload_training_state(self) -> None:
        """The first half of `sleep`: leaves the weights, which the engines are to be given."""
        with self._timer.spans.measure("offload_training_state"):
            self.backend.memory.offload_training_state()
            _release_cache()

    def sleep(self) -> None:
        """Moves weights and optimizer state to host memory and drops the gradients."""
        with self._timer.spans.measure("sleep"):
            self.backend.memory.offload()
            _release_cache()

    def wake_up(self) -> None:
        """Brings back to the device what `sleep` has moved away."""
        with self._timer.spans.measure("wake_up"):
            self.backend.memory.onload()


class TrainRayActor(TrainWorker):
    """A trainer process as a Ray actor.

    Ray decides where it runs; the first rank offers the meeting point.
    """

    def __init__(self, args: Namespace, role: str, rank: int, world_size: int) -> None:
        self._become(args, role, rank, world_size, local_gpu())

    def _become(self, args: Namespace, role: str, rank: int, world_size: int, gpu: int) -> None:
        """Makes this process a rank, on a GPU as CUDA counts."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(gpu))
        TrainWorker.__init__(self, args, role)

    def process_location(self) -> ProcessLocation:
        return process_location()

    def address_and_free_port(self) -> tuple[str, int]:
        """Returns where rank 0 will host the rendezvous of the group.

        On loopback if the cluster is one machine.
        """
        host = node_host()
        return host, reserve_port(host)

    def init(self, master_addr: str, master_port: int) -> int:
        """Joins the others, builds and loads the model; returns the rollout id to start from."""
        os.environ.update(MASTER_ADDR=master_addr, MASTER_PORT=str(master_port))
        start = self.start()
        # What is there now stays: collections that look through it again would take a quarter of a second.
        gc.collect()
        gc.freeze()
        reached("trainers ready")
        return start

    def train(
        self, rollout_id: int, data_refs: list[ray.ObjectRef], inputs: list[ray.ObjectRef] | None = None
    ) -> tuple[dict[str, Any], ray.ObjectRef | None, list[Span]]:
        """Trains on this rank's shard.

        The references come inside lists, which Ray does not resolve: each rank fetches its own shard and
        what another role's same rank gave, and no other.

        Returns:
            The main rank's metrics, a reference to what this role gives to others, if it does, and the rank's
            spans since the last call: those by which ranks are compared, unless all are collected.
        """
        shard = ray.get(data_refs[self.parallel_config()["dp_rank"]])
        values = None if inputs is None else ray.get(inputs[self._config.cluster.rank])
        report, trained = self.train_shard(rollout_id, shard, values)
        spans = self._timer.spans.take()
        outputs = ray.put(trained.outputs) if self._role.outputs else None
        return report, outputs, spans if self._config.debug.collects_spans else spans_alone(spans)


def _release_cache() -> None:
    gc.collect()
    empty_cache()
