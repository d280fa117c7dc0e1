"""The rollout side as the driver sees it."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from slime.arguments.core.run_args import copied
from slime.config.run import RunConfig, run_config
from slime.config.served_models import DEFAULT
from slime.observability.run_log import RunLog
from slime.ray.actor_classes import RolloutManager
from slime.ray.beside import Beside
from slime.ray.losses import RolloutSideLost, losses_named
from slime.ray.members import KeptMembers
from slime.ray.node import process_env, runtime_env
from slime.ray.pending_rollout import Generated, PendingRollout, begun
from slime.ray.placement_group import Slots
from slime.ray.process_watch import ProcessWatch
from slime.ray.waiting import wait_one
from slime.utils.types import EngineEndpoint

if TYPE_CHECKING:  # needs libraries that the driver does without
    from slime.rollout.data_state import DataState

logger = logging.getLogger(__name__)

# Beyond a rollout's own deadline: conversion, metrics, state files.
_GRACE = 60.0
_REPLACING = 300.0  # seconds beyond the start of engines: deaths are waited for, and the end of the dead
_FLEET_TIMEOUT = 60.0  # seconds that a manager may take to answer while it works
_STOP_TIMEOUT = 30.0  # seconds for servers to end by themselves before they are killed
MANAGER_RESTARTS = 3  # in one step


class RolloutGroup:
    """Calls the manager, names and bounds every wait, and logs what it measured.

    Args:
        needs_offload: whether a trainer shares the engines' GPUs; if not, ``offload`` and ``onload_*``
            do nothing.

    Attributes:
        starts: how often the rollout side has been started.
        position: the latest rollout, and what the data source told of itself after it.
    """

    def __init__(
        self, config: RunConfig, slots: Slots, trainer_gpus: int, log: RunLog, *, needs_offload: bool
    ) -> None:
        self._config, self._log, self._needs_offload = config, log, needs_offload
        self._slots, self._trainer_gpus = slots, trainer_gpus
        self._parallel_configs: dict[str, dict[str, int]] = {}
        self._engines, self._members = ProcessWatch(), KeptMembers()
        self._restarts = self.starts = 0
        self._launches, self._earlier_launches = Counter[str](), Counter[str]()  # of engines, by policy
        self._state: DataState | None = None  # before the step under way
        self.position: tuple[int, DataState | None] = -1, None
        self._unsaved: dict[int, str] = {}
        self._under_way: PendingRollout | None = None
        self._launch()
        self.num_rollout_per_epoch: int | None = None
        self.num_rollout: int | None = config.data.num_rollout

    def _launch(self) -> None:
        """Starts the manager, which starts its engines in the background."""
        self.starts += 1
        self._manager = (
            ray.remote(RolloutManager)
            # Several calls at a time: a run can be watched and stopped while a rollout is under way.
            .options(num_cpus=1, num_gpus=0, max_concurrency=4, runtime_env=runtime_env(process_env()))
            .remote(self._config, self._slots, self._trainer_gpus, self._members.now())
        )
        self._watch = ProcessWatch()
        self._watch.add("the rollout manager", self._manager)
        self._started = self._manager.start.remote()
        self._ready = False
        self._to_check: dict[tuple[str, str | None], tuple[list[int], list[float]]] = {}

    def wait_ready(self) -> None:
        """Waits for engines and router, and learns the number of rollouts.

        Engines that share GPUs come up released: the first weights they serve are the trainer's.
        Calling it again does nothing.
        """
        if self._ready:
            return
        self._ready = True
        limit = self._config.cluster.engine_startup_timeout + _GRACE
        with losses_named(self._state is not None, ray.exceptions.RayTaskError):
            wait_one(self._started, "start of the rollout side", limit, self._watch.check)
        self.offload()
        for notice in self._call("notices"):
            logger.warning("%s", notice)
        self.num_rollout_per_epoch = self._call("num_rollout_per_epoch")
        self.num_rollout = self._call("num_rollout")
        if self.num_rollout is None:
            raise RuntimeError(
                f"--num-epoch {self._config.data.num_epoch}: --prompt-data has fewer prompts than "
                f"--rollout-batch-size {self._config.batches.rollout_batch_size} "
                "(wanted: --num-rollout, or more)"
            )

    def keep_state(self) -> None:
        """From now on another manager may take the place of one that is lost, from where the data is now.

        Without fault tolerance, or where the data source does not tell its state, none does.
        """
        state = self._call("data_state")
        if state is not None:
            self._find_engines()  # before: whose end is waited for must be known by then
        self._state = state

    def end_step(self) -> None:
        """Has another manager go on after the last rollout: it was trained on, or is held for that."""
        if self._state is not None:
            self._state, self._restarts = self.position[1], 0

    def may_restart(self) -> bool:
        """Whether `restart` may be called now."""
        return self._state is not None and self._restarts < MANAGER_RESTARTS

    def restart(self, lost: RolloutSideLost) -> None:
        """Starts the rollout side again, with the data as it was before the step under way.

        Its engines have no weights of the trainer's yet; those that share GPUs are offloaded. A rollout under
        way is made anew once its result is asked for.

        Raises:
            RolloutSideLost: it was lost again.
            ProcessStopped: something of it has not ended.
        """
        self._restarts += 1
        logger.warning("the rollout side is started again: %s", lost)
        self.end()
        self._start_again()
        self._call("restore", self._state)

    def end(self) -> None:
        """Ends the manager, engines and routers, for `restart` or `go_back`.

        Raises:
            ProcessStopped: something has not ended.
        """
        self._ready = False
        if self._under_way is not None:
            self._under_way.lose()
        ray.kill(self._manager)
        for watch in (self._watch, self._engines):
            watch.wait_until_gone(self._config.cluster.cluster_timeout)

    def go_back(self, load: str, rollout_id: int, state: "DataState | None" = None) -> None:
        """Starts the rollout side, which has ended, as it was after a rollout.

        Args:
            load: the checkpoints beside which the position in the data lies.
            state: that position, where it is not read from there.
        """
        self._config = run_config(copied(self._config.flat, load=load))
        self._start_again()
        if state is None:
            self.load(rollout_id)
        else:
            self._call("restore", state, rollout_id)
        self.keep_state()

    def _start_again(self) -> None:
        with self._log.phase("restart"):
            self._earlier_launches.update(self._launches)
            self._launch()
            self.wait_ready()
            for policy, config in self._parallel_configs.items():
                self.set_train_parallel_config(config, policy)
            if self._state is not None:
                self._find_engines()

    def _find_engines(self) -> None:
        """Learns whose end has to be waited for, should the manager be lost, and who belongs to the fleet."""
        self._members.take(self._call("ask_membership", "members"))
        self._engines = ProcessWatch()
        for name, location in self._call("engine_processes"):
            self._engines.add_process(name, location)

    def unsaved(self, rollout_id: int) -> str | None:
        """Why the position in the data after a rollout could not be saved; None if it was, or is not."""
        return self._unsaved.pop(rollout_id, None)

    def load(self, rollout_id: int) -> None:
        self._call("load", rollout_id)

    def async_generate(self, rollout_id: int, updates_ahead: int = 0) -> PendingRollout:
        """Starts a rollout and returns at once.

        Args:
            updates_ahead: weight updates that will come before it is trained on.
        """
        self._under_way = PendingRollout(
            lambda: self._begin(rollout_id, updates_ahead), lambda ref: self._finish(rollout_id, ref)
        )
        return self._under_way

    def _begin(self, rollout_id: int, updates_ahead: int) -> list[ray.ObjectRef]:
        shards = sum(config["dp_size"] for config in self._parallel_configs.values())
        return begun(self._manager, shards, rollout_id, updates_ahead)

    def _finish(self, rollout_id: int, ref: ray.ObjectRef) -> None:
        """Waits for a rollout, and takes note of what is told of it."""
        limit = self._config.cluster.rollout_timeout + _GRACE
        with self._log.phase("rollout_wait", rollout=rollout_id), losses_named(self._state is not None):
            found: Generated = wait_one(ref, f"rollout {rollout_id}", limit, self._watch.check)
        self.position = rollout_id, found.data_state
        self._unsaved.pop(rollout_id, None)  # of one that was made before ranks were lost
        if found.unsaved is not None:
            self._unsaved[rollout_id] = found.unsaved
        self._log.spans("rollouts", found.spans)
        self._log.rollout(rollout_id, found.metrics)
        for warning in found.warnings:
            logger.warning("rollout %d: %s", rollout_id + 1, warning)

    def generate(self, rollout_id: int) -> Sequence[ray.ObjectRef]:
        """One rollout: the train shard of each data-parallel rank, of one policy after the other."""
        return self.async_generate(rollout_id).result()

    def eval(self, rollout_id: int) -> None:
        """Evaluates after ``rollout_id`` rollouts of training."""
        limit = self._config.cluster.rollout_timeout + _GRACE
        with self._log.phase("eval", rollout=rollout_id):
            metrics, spans = self._call("eval", rollout_id, timeout=limit)
        self._log.spans("evaluations", spans)
        self._log.eval(rollout_id, metrics)

    def want_evaluation(self) -> None:
        """Has the engines of ``--eval-model`` take the next weight update."""
        self._call("want_evaluation")

    def beside(self) -> Beside:
        """What an evaluation by the engines of ``--eval-model`` needs to know of them."""
        return self._call("beside")

    def check(self) -> None:
        """Raises if an engine or the router has ended; before the start is over there is none yet.

        A rollout side that may be started again is, when it is needed: training goes on.
        """
        if self._ready:
            try:
                self._call("check")
            except RolloutSideLost:
                if not self.may_restart():
                    raise

    def set_train_parallel_config(self, config: dict[str, int], policy: str = DEFAULT) -> None:
        self._parallel_configs[policy] = config
        self._call("set_train_parallel_config", config, policy)

    def updatable_engines(
        self, suspicious: bool = False, policy: str = DEFAULT
    ) -> tuple[list[EngineEndpoint], int]:
        """The engines to send a policy's weights to, and a number that changes when one of them was replaced.

        Args:
            suspicious: one of them seems to have died just now.
        """
        probe = self._config.fault_tolerance.rollout_health_check_timeout
        timeout = self._config.cluster.engine_startup_timeout + probe + _REPLACING
        engines, launches = self._call("updatable_engines", suspicious, policy, timeout=timeout)
        self._launches[policy] = launches
        return engines, self._earlier_launches[policy] + launches

    def weights_updated(self, version: int, policy: str = DEFAULT) -> None:
        self._call("weights_updated", version, policy)
        if self._state is not None:
            self._find_engines()

    def router_url(self) -> str:
        """Where engines are asked, once they serve."""
        return self._call("router_url")

    def probe_tokens(self, policy: str = DEFAULT) -> list[int]:
        """The text by which the served policy is judged."""
        return self._call("probe_tokens", policy)

    def check_policy(
        self, tokens: list[int], expected: list[float], adapter: str | None = None, policy: str = DEFAULT
    ) -> None:
        """Compares the engines' log-probs of a text with the trainer's, once the engines can compute.

        Args:
            adapter: with which they are computed, of several.

        Raises:
            PolicyMismatch: of an engine that answers with another policy.
        """
        # In the place of what older weights said, if engines were lost before they were asked.
        self._to_check[policy, adapter] = tokens, expected
        if not self._needs_offload:
            self._check_policy()

    def _check_policy(self) -> None:
        pending, self._to_check = self._to_check, {}
        for (policy, adapter), text in pending.items():
            self._call("check_policy", *text, adapter, policy)

    def offload(self) -> None:
        if self._needs_offload:
            with self._log.span("engines_offload"):
                self._call("offload")

    def onload_weights(self) -> None:
        if self._needs_offload:
            with self._log.span("engines_onload", part="weights"):
                self._call("onload", ["weights"])

    def onload_kv(self) -> None:
        if self._needs_offload:
            with self._log.span("engines_onload", part="kv_cache"):
                self._call("onload", ["kv_cache", "cuda_graph"])
            self._check_policy()

    def ask_fleet(self, method: str, *arguments: object, timeout: float = _FLEET_TIMEOUT) -> Any:
        """What the fleet's `Membership` answers; from any thread."""
        ref = self._manager.ask_membership.remote(method, *arguments)
        with losses_named(self._state is not None):
            return self._members.take(wait_one(ref, f"rollout manager: engines: {method}", timeout))

    def shutdown(self) -> None:
        """Stops engines and router; an unfinished rollout is lost."""
        try:
            self._call("dispose", timeout=_STOP_TIMEOUT)
        except Exception as error:
            # Not raised: the failure that led here is the one to be told.
            logger.warning("the rollout side did not stop by itself: %s", error)
        finally:
            ray.kill(self._manager)

    def _call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        ref = getattr(self._manager, method).remote(*arguments)
        limit = timeout or self._config.cluster.engine_startup_timeout
        # Those two are called when something has ended already.
        look = self._watch.check if method in ("check", "dispose") else self._look
        with losses_named(self._state is not None):
            return wait_one(ref, f"rollout manager: {method}", limit, look)

    def _look(self) -> None:
        self._watch.check()
        if self._ready:
            self._call("check")
