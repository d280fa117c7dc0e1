"""The trainer as the driver sees it: one object for a group of Ray actors."""

import logging
from collections.abc import Sequence
from typing import Any

import ray

from slime.arguments.views import FleetView
from slime.observability import phases
from slime.observability.run_log import RunLog
from slime.observability.startup import reached
from slime.ray.actor_classes import TrainRayActor
from slime.ray.node import process_env, runtime_env
from slime.ray.placement_group import Slots
from slime.ray.process_watch import ProcessStopped, ProcessWatch
from slime.ray.rollout_group import RolloutGroup
from slime.ray.waiting import wait_all, wait_one
from slime.training.optimizer_schedule import steps_of_rollouts
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

# A colocated engine takes part of the same GPU: 0.4 + 0.2 leaves room for both and for probes.
GPU_PER_ACTOR = 0.4


Engines = tuple[list[EngineEndpoint], int]
"""Where they serve, and a number that changes when one of them was replaced."""

RoleOutputs = list[ray.ObjectRef]
"""What a role gives to others of a rollout, by rank."""


class RayTrainGroup:
    """The ranks of one role: ``len(slots)`` trainer processes that work in step.

    Args:
        slots: one slot per rank; an empty group (rollout-only runs) answers every call with nothing.
        rollout: where the weights go.
        needs_offload: whether engines share these GPUs; if not, ``onload`` and ``offload`` do nothing.
    """

    def __init__(
        self,
        args: FleetView,
        slots: Slots,
        rollout: RolloutGroup,
        log: RunLog,
        *,
        role: str = "actor",
        needs_offload: bool = False,
    ) -> None:
        self._args, self._rollout, self._log = args, rollout, log
        self._role, self._needs_offload = role, needs_offload
        self._connected: Engines = ([], 0)
        self._proven = False
        self._watch = ProcessWatch()
        self._actors = [self._spawn(rank, slots) for rank in range(len(slots))]
        for rank, actor in enumerate(self._actors):
            self._watch.add(f"rank {rank}", actor)
        self._pending_init = self._start()
        self.start_rollout_id = args.start_rollout_id or 0

    def wait_ready(self) -> None:
        """Waits until every rank has loaded its model, and learns where the run starts."""
        starts = self._gather(self._pending_init, "building and loading the model")
        if not starts:
            return
        if len(set(starts)) != 1:
            raise RuntimeError(f"trainer ranks disagree about the first rollout: {starts}")
        if self._args.start_rollout_id is None:
            self.start_rollout_id = starts[0]
        steps = wait_one(self._actors[0].trained_steps.remote(), "optimizer steps of the checkpoint", 60)
        if steps is None:  # of older checkpoints: those of full rollouts
            steps = steps_of_rollouts(self._args, self.start_rollout_id)
        self._log.go_on_after(steps)
        config = wait_one(self._actors[0].parallel_config.remote(), "parallel layout of the trainer", 60)
        self._rollout.set_train_parallel_config(config)

    def train(
        self, rollout_id: int, data_refs: Sequence[ray.ObjectRef], inputs: RoleOutputs | None = None
    ) -> RoleOutputs:
        """Trains on one rollout, logs the main rank's report, and returns what the role gives to others.

        Args:
            inputs: the outputs of another role, if there is one.
        """
        if not self._actors:
            return []
        with self._log.phase("train_wait"):
            refs = [actor.train.remote(rollout_id, list(data_refs), inputs or None) for actor in self._actors]
            outcomes = self._gather(refs, f"training on rollout {rollout_id}")
        self._log.train(rollout_id, next((report for report, _, _ in outcomes if report), {}))
        for rank, (_, _, spans) in enumerate(outcomes):
            self._log.spans(f"{self._role} rank {rank}", spans)
        return [ref for _, ref, _ in outcomes if ref is not None]

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        with self._log.phase("save_model"):
            what, steps = f"saving rollout {rollout_id}", self._log.trained_steps
            self._call_all(what, "save_model", rollout_id, force_sync, steps)

    def update_weights(self) -> None:
        """Gives every engine the current weights, reconnecting first if the engines have changed."""
        with self._log.phase("update_weights"):
            self._update_weights()
        reached("first weights sent")
        phases.reached("the run begins")

    def _update_weights(self) -> None:
        engines = self._rollout.updatable_engines() if self._actors else ([], 0)
        if not engines[0]:
            return
        try:
            version = self._send_weights(engines)
        except ray.exceptions.RayTaskError as error:
            replaced = self._rollout.updatable_engines(suspicious=True)
            if replaced == engines:
                raise
            # An engine died meanwhile, and fault tolerance has put another in its place.
            logger.warning("the weight update begins again: %s", str(error).splitlines()[-1])
            version = self._send_weights(replaced)
        self._rollout.weights_updated(version)
        self._prove_policy()

    def _prove_policy(self) -> None:
        """Holds the engines' log-probs of a text against the trainer's, once or after each update."""
        args = self._args
        if not args.check_served_policy or (self._proven and not args.check_weight_update_equal):
            return
        self._proven = True
        tokens = self._rollout.probe_tokens()
        found = self._call_all("log-probs of a prompt", "text_log_probs", tokens)
        self._rollout.check_policy(tokens, next(values for values in found if values is not None))

    def _send_weights(self, engines: Engines) -> int:
        """The new version."""
        if engines != self._connected:
            # Nothing counts as connected until an update has succeeded.
            self._connected = ([], 0)
            self._call_all("connecting trainer and engines", "connect_rollout_engines", engines[0])
        outcomes = self._call_all("updating the weights", "update_weights")
        self._connected = engines
        self._log.count("update_weights_wire_bytes", sum(sent for _, sent in outcomes))
        return max(version for version, _ in outcomes)

    def onload(self) -> None:
        if self._needs_offload:
            with self._log.phase("wake_up"):
                self._call_all("loading the trainer back", "wake_up")

    def offload_training_state(self) -> None:
        """Makes room for the weights of the engines; a weight update needs no more than the trainer's own."""
        if self._needs_offload:
            with self._log.phase("sleep"):
                self._call_all("offloading the optimizer", "offload_training_state")

    def offload(self) -> None:
        if self._needs_offload:
            with self._log.phase("sleep"):
                self._call_all("offloading the trainer", "sleep")

    def shutdown(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _spawn(self, rank: int, slots: Slots) -> Any:
        env = process_env(self._args.train_env_vars, trainer=True)
        return (
            ray.remote(TrainRayActor)
            .options(
                num_gpus=GPU_PER_ACTOR,
                num_cpus=GPU_PER_ACTOR,
                scheduling_strategy=slots.strategy(rank),
                runtime_env=runtime_env(env),
            )
            .remote(self._args, self._role, rank, len(slots))
        )

    def _start(self) -> list[ray.ObjectRef]:
        if not self._actors:
            return []
        found = self._actors[0].address_and_free_port.remote()
        address, port = wait_one(found, "start of the trainer processes", self._args.cluster_timeout)
        return [actor.init.remote(address, port) for actor in self._actors]

    def _call_all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        return self._gather([getattr(actor, method).remote(*arguments) for actor in self._actors], what)

    def _gather(self, refs: list[ray.ObjectRef], what: str) -> list[Any]:
        """Waits for all ranks; whatever dies or is stopped meanwhile ends the wait by name."""
        what = f"{self._role}: {what}"
        return wait_all(refs, what, self._args.train_timeout, lambda: self._look(what))

    def _look(self, what: str) -> None:
        try:
            self._watch.check()
        except ProcessStopped as error:
            raise ProcessStopped(f"{what}: {error}") from error
        self._rollout.check()
