"""The trainer as the driver sees it: one object for a group of Ray actors."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from slime.config.run import RunConfig
from slime.observability import phases
from slime.observability.run_log import RunLog
from slime.observability.slow_ranks import report_of_all
from slime.observability.startup import reached
from slime.ray.losses import RanksLost, UpdateFailed, lost_ranks_named
from slime.ray.placement_group import Slots
from slime.ray.policy_side import PolicySide
from slime.ray.process_watch import ProcessStopped, ProcessWatch
from slime.ray.rank_processes import RankProcesses
from slime.ray.rollout_group import RolloutGroup
from slime.ray.waiting import DeadlineExceeded, pause_before, wait_all
from slime.ray.whole_checkpoint import resumed_from_newest, whole_checkpoint
from slime.training.optimizer_schedule import steps_of_rollouts
from slime.utils.types import EngineEndpoint
from slime.weight_sync.broken import GROUP_BROKE
from slime.weight_sync.report import of_all_ranks

logger = logging.getLogger(__name__)

_SPANS_TIMEOUT = 5.0  # seconds at the end of a run
_ATTEMPTS = 5  # at one weight update, of which each that fails has lost an engine
_NO_ANSWER = "no answer"  # of an engine, by `EngineError` and transports

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
        config: RunConfig,
        slots: Slots,
        rollout: RolloutGroup | PolicySide,
        log: RunLog,
        *,
        role: str = "actor",
        needs_offload: bool = False,
    ) -> None:
        self._config, self._rollout, self._log = config, rollout, log
        self._role, self._needs_offload = role, needs_offload
        self._name = f"{config.policies.policy_name or ''} {role}".strip()
        self._start_timeout, self._has_ranks = config.cluster.cluster_timeout, bool(slots)
        self._version, self._torn, self._slow = 0, False, False  # sent last; ended half-way; was slow in it
        self.processes = RankProcesses(config, role, slots)
        self._launch(config)
        self.start_rollout_id, self.shards = config.data.start_rollout_id or 0, 0

    def _launch(self, config: RunConfig) -> None:
        """Starts the ranks, which build their models in the background."""
        self._connected: Engines | None = None
        self._launched = config
        self._unproven = math.inf
        self._watch = ProcessWatch()
        self._actors = self.processes.start(config)
        for rank, actor in enumerate(self._actors):
            self._watch.add(f"rank {rank}", actor)
        self._pending_init = self._start()

    def wait_ready(self) -> None:
        """Waits until every rank has loaded its model, and learns where the run starts."""
        start = self._first_rollout("building and loading the model")
        if start is None:
            return
        if self._config.data.start_rollout_id is None:
            self.start_rollout_id = start
        steps = self._steps_of_checkpoint()
        if steps is None:  # of older checkpoints: those of full rollouts
            steps = steps_of_rollouts(self._config.batches, self.start_rollout_id)
        self._log.go_on_after(steps)
        (config,) = self._gather([self._actors[0].parallel_config.remote()], "parallel layout", 60)
        self.shards = config["dp_size"]
        self._rollout.set_train_parallel_config(config)
        self.processes.keep_standbys()

    @property
    def checkpoints(self) -> str | None:
        """Where the role saves; None where it does not, or has no ranks."""
        return self._config.checkpoints.save if self._has_ranks else None

    def rebuild(self, load: str | Path, up_to: int | None = None) -> int:
        """Ends all ranks, dead and hung ones among them, and starts the role again in the same places.

        Afterwards they are on their GPUs, as after the start; engines that share these must be offloaded. No
        engine is connected: the next update gives all the weights, under a version above all they were sent.

        Args:
            load: what the ranks start from, as with ``--load``: a directory of this run's checkpoints, of
                which the latest whole one is taken with all its state, or one of Hugging Face weights.
            up_to: no checkpoint after this iteration.

        Returns:
            The rollout to go on with; 0 with Hugging Face weights.

        Raises:
            ValueError: there is no checkpoint, or none that is whole; no rank was touched.
        """
        look = self._name, load, self._config.checkpoints.verify_checkpoint, up_to
        whole_checkpoint(*look)
        with self._log.phase("rebuild", role=self._role):
            self._end_ranks()
            self._launch(resumed_from_newest(self._config, *look))  # which may have been written meanwhile
            start = self._first_rollout(f"building the model again from {load}")
            if start is None:
                return 0
            self.call_all("going on from the version of the engines", "go_on", self._version, self._torn)
            steps = self._steps_of_checkpoint()
        self.processes.keep_standbys()
        if steps is not None:
            self._log.go_back_to(steps)
        return start

    def _end_ranks(self) -> None:
        """Kills them, and waits until they hold no memory."""
        for actor in self._actors:
            ray.kill(actor)
        self._watch.wait_until_gone(self._start_timeout)

    def _first_rollout(self, what: str) -> int | None:
        """Waits until every rank has started; None without ranks."""
        starts = self._gather(self._pending_init, what)
        if len(set(starts)) > 1:
            raise RuntimeError(f"trainer ranks disagree about the first rollout: {starts}")
        return starts[0] if starts else None

    def _steps_of_checkpoint(self) -> int | None:
        return self._gather([self._actors[0].trained_steps.remote()], "steps of the checkpoint", 60)[0]

    def train(
        self, rollout_id: int, data_refs: Sequence[ray.ObjectRef], inputs: RoleOutputs | None = None
    ) -> RoleOutputs:
        """Trains on one rollout, with another role's outputs; returns what the role gives to others."""
        return self.end_training(rollout_id, self.begin_training(rollout_id, data_refs, inputs))

    def begin_training(
        self, rollout_id: int, data_refs: Sequence[ray.ObjectRef], inputs: RoleOutputs | None
    ) -> list[ray.ObjectRef]:
        """The first half of `train`, which does not wait."""
        return [actor.train.remote(rollout_id, list(data_refs), inputs or None) for actor in self._actors]

    def end_training(self, rollout_id: int, refs: list[ray.ObjectRef]) -> RoleOutputs:
        """The second half of `train`: logs the main rank's report."""
        if not self._actors:
            return []
        with self._log.phase("train_wait", role=self._role, rollout=rollout_id):
            outcomes = self._gather(refs, f"training on rollout {rollout_id}")
        of_ranks = [(report, spans) for report, _, spans in outcomes]
        self._log.train(rollout_id, report_of_all(of_ranks, self._role))
        for rank, (_, _, spans) in enumerate(outcomes):
            self._log.spans(f"{self._name} rank {rank}", spans)
        self.processes.keep_standbys()
        return [ref for _, ref, _ in outcomes if ref is not None]

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Saves on all ranks.

        Raises:
            RuntimeError: this save failed, or an earlier one in the background.
        """
        for reason in filter(None, self.try_to_save(rollout_id, force_sync)):
            raise RuntimeError(reason)

    def try_to_save(
        self, rollout_id: int, force_sync: bool = False, memory: str | None = None
    ) -> list[str | None]:
        """Saves on all ranks; a failure that all of them know is returned.

        Args:
            memory: where a snapshot is written, in place of a checkpoint.

        Returns:
            For each save whose end is known now why it failed, None if it is complete.
        """
        with self._log.phase("snapshot" if memory else "save_model", role=self._role, rollout=rollout_id):
            what, steps = f"saving rollout {rollout_id}", self._log.trained_steps
            of_ranks = self.call_all(what, "save_model", rollout_id, force_sync, steps, memory)
        outcomes = of_ranks[0] if of_ranks else []
        if (failed := len(outcomes) - outcomes.count(None)) and memory is None:
            self._log.count("failed_saves", failed)
        return outcomes

    def update_weights(self, adapters: Sequence[str] | None = None) -> None:
        """Gives every engine the current weights, of all adapters or those named, to new engines too."""
        if self._sends_weights():
            with self._log.phase("update_weights"):
                self._update_weights(adapters or self._config.lora.named_adapters)
        reached("first weights sent")
        phases.reached("the run begins")

    def follow_engines(self) -> None:
        """Takes the weights that the engines have for those that made the next rollout: it is repeated."""
        if self._config.off_policy.keep_old_actor:
            self.call_all("taking the engines' weights for the old actor's", "follow_engines")

    def _sends_weights(self) -> bool:
        """Whether there are a trainer and anybody for its weights; else a step says nothing of updates."""
        publishes = self._config.weight_sync.publish_weights
        return self._has_ranks and (publishes or not self._config.debug.debug_train_only)

    def _update_weights(self, adapters: Sequence[str]) -> None:
        engines = self._rollout.updatable_engines()
        if not engines[0]:
            if self._config.weight_sync.publish_weights:
                self._send_weights(engines)
            return
        for attempt in range(_ATTEMPTS, 0, -1):
            try:
                version = self._send_weights(engines)
                break
            except ray.exceptions.RayTaskError as error:
                engines = self._engines_after(error, engines, attempt - 1)
        self._rollout.weights_updated(version)
        self._prove_policy(adapters)

    def _engines_after(self, error: ray.exceptions.RayTaskError, engines: Engines, left: int) -> Engines:
        """The engines to begin a failed update again with: one of them has died or hung, was slow or cut off.

        Raises:
            RayTaskError: the failure is none of that.
            UpdateFailed: there is no attempt left.
        """
        self._connected = None  # those that are left have stopped in the middle
        found = self._rollout.updatable_engines(suspicious=True)
        self._slow |= _NO_ANSWER in str(error)  # what it does late may fail the next attempt too
        may_go = self._slow or GROUP_BROKE in str(error)
        if found == engines and not (may_go and self._config.fault_tolerance.use_fault_tolerance):
            raise error
        told = str(error).splitlines()[-1]
        if not left:
            raise UpdateFailed(f"the weight update failed {_ATTEMPTS} times in a row: {told}") from error
        logger.warning("the weight update begins again: %s", told)
        pause_before(_ATTEMPTS - left if found == engines else 0)  # nobody was started meanwhile
        return found

    def _prove_policy(self, adapters: Sequence[str]) -> None:
        """Holds the engines' log-probs of a text against the trainer's, once, at times or after each update.

        Adapters add nothing at first, so that they are not proven by the first one.
        """
        sync = self._config.weight_sync
        self._unproven += 1
        each = sync.check_weight_update_equal or self._config.lora.serves_adapter
        interval = 1 if each else sync.served_policy_interval or math.inf
        if not sync.check_served_policy or self._unproven < interval:
            return
        self._unproven, tokens = 0, self._rollout.probe_tokens()
        for whose in [[name] for name in adapters] or [[]]:
            found = self.call_all("log-probs of a prompt", "text_log_probs", tokens, *whose)
            self._rollout.check_policy(tokens, next(values for values in found if values is not None), *whose)

    def _send_weights(self, engines: Engines) -> int:
        """The new version."""
        if engines != self._connected:
            # Nothing counts as connected until an update has succeeded.
            self._connected = None
            self.call_all("connecting trainer and engines", "connect_rollout_engines", engines[0])
        self._torn = True
        outcomes = self.call_all("updating the weights", "update_weights")
        self._connected = engines
        report = of_all_ranks(report for _, report in outcomes)
        self._log.count("update_weights_wire_bytes", report.sent)
        self._log.count("update_weights_transfer_time", report.transfer)
        self._log.count("update_weights_pause_time", report.pause)
        known = {"commit_time": report.commit, "floor_time": report.floor}
        for name, value in {**known, "rounding": report.rounding, "density": report.density}.items():
            if value:
                self._log.count(f"update_weights_{name}", value)
        self._version, self._torn, self._slow = max(version for version, _ in outcomes), False, False
        return self._version

    def onload(self) -> None:
        if self._needs_offload:
            with self._log.phase("wake_up", role=self._role):
                self.call_all("loading the trainer back", "wake_up")

    def offload_training_state(self) -> None:
        """Makes room for the weights of the engines; a weight update needs no more than the trainer's own."""
        if self._needs_offload:
            with self._log.phase("sleep", role=self._role):
                self.call_all("offloading the optimizer", "offload_training_state")

    def offload(self) -> None:
        if self._needs_offload:
            with self._log.phase("sleep", role=self._role):
                self.call_all("offloading the trainer", "sleep")

    def shutdown(self) -> None:
        self._take_spans()
        self.processes.end_standbys()
        for actor in self._actors:
            ray.kill(actor)

    def _take_spans(self) -> None:
        """Writes the spans since the last training, unless a rank can no longer tell them."""
        if self._log.traces:
            with suppress(Exception):  # whatever ended the run is told elsewhere
                refs = [actor.take_spans.remote() for actor in self._actors]
                for rank, spans in enumerate(wait_all(refs, "spans of the trainer", _SPANS_TIMEOUT)):
                    self._log.spans(f"{self._name} rank {rank}", spans)

    def _start(self) -> list[ray.ObjectRef]:
        if not self._actors:
            return []
        found = [self._actors[0].address_and_free_port.remote()]
        ((address, port),) = self._gather(found, "start of the processes", self._start_timeout)
        return [actor.init.remote(address, port) for actor in self._actors]

    def call_all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        """What each rank's method returns; ``what`` it is for is in the message if one fails."""
        return self._gather([getattr(actor, method).remote(*arguments) for actor in self._actors], what)

    def _gather(self, refs: list[ray.ObjectRef], what: str, seconds: float | None = None) -> list[Any]:
        """Waits for all ranks; whatever dies or is stopped meanwhile ends the wait by name."""
        what, seconds = f"{self._name}: {what}", seconds or self._config.cluster.train_timeout
        try:
            with lost_ranks_named(what):
                return wait_all(refs, what, seconds, lambda: self._look(what))
        except DeadlineExceeded:
            self._watch.show_stacks()
            raise

    def _look(self, what: str) -> None:
        try:
            self._watch.check()
        except ProcessStopped as error:
            raise RanksLost(f"{what}: {error}") from error
        self._rollout.check()
