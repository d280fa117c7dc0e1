"""The rollout manager: one Ray actor that turns prompts into train batches."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from slime.arguments.core.runtime_context import with_context
from slime.config.run import RunConfig, options_of, run_config
from slime.config.served_models import DEFAULT
from slime.observability.logging_utils import take_logged
from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data
from slime.observability.rollout_metrics import rollout_log_metrics
from slime.observability.silent_rollouts import SilentRollouts
from slime.observability.spans import Span, SpanList, sample_spans
from slime.observability.startup import reached
from slime.ray.addresses import with_addresses
from slime.ray.beside import Beside, beside
from slime.ray.evaluator import evaluated_samples, report_of
from slime.ray.fleet_setup import fleet_of
from slime.ray.members import Members
from slime.ray.pending_rollout import Generated
from slime.ray.placement_group import Slots
from slime.ray.policies import policy_configs
from slime.ray.policy_samples import PolicyBatches
from slime.ray.process_watch import ProcessLocation, process_location
from slime.ray.served_policy import probe_tokens
from slime.rollout.answer_log import answer_log_for
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, describe
from slime.rollout.checks import check_samples
from slime.rollout.data_source import rollouts_of_run, rollouts_per_epoch
from slime.rollout.data_state import DataState, data_metrics, state_now
from slime.rollout.generation import get_model_url
from slime.rollout.trained import trained_samples
from slime.training.conversion import flatten_samples
from slime.training.rewards import name_groups
from slime.utils.allowed_hosts import tell_hosts
from slime.utils.http_utils import init_http_client, share_key_with
from slime.utils.misc import load_function, should_run_periodic_action, spare_collector
from slime.utils.notes import take_notes
from slime.utils.plain_file import is_write_error
from slime.utils.types import EngineEndpoint, Sample
from slime.utils.weight_clock import clock

logger = logging.getLogger(__name__)
POLL = 0.5  # seconds between two looks at the fleet while a rollout runs
SUSPICION = 10.0  # seconds until an engine that has died is seen to have ended, on a busy machine


class RolloutManager:
    """Composes a fleet of models, a data source and a rollout function.

    It decides nothing about sampling (the rollout function does) and nothing about batches
    (``slime.training.conversion`` does).
    """

    def __init__(
        self, config: RunConfig, slots: Slots, trainer_gpus: int, former: Members | None = None
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request
        tell_hosts(config.rewards.allowed_hosts)
        # Before anything is made of them: data source, rollout functions and hooks learn the same.
        engines = config.engines
        config = with_addresses(config) if engines.served_models or engines.rollout_external else config
        self._fleet = fleet_of(config, slots, trainer_gpus, former)
        self._rollout_fn = load_function(config.rollout.rollout_function_path)
        self._eval_fn = load_function(config.evaluation.eval_function_path)
        self._data_source = load_function(config.data.data_source_path)(config.flat)
        self._config = config
        self._config = run_config(with_context(config.flat, num_rollout=self.num_rollout()))
        self._policies = PolicyBatches(policy_configs(self._config))
        clock.keeps_prefixes = config.weight_sync.pause_generation_mode == "in_place"
        context = options_of(self._config, "sglang_").get("context_length")
        self._answers = answer_log_for(self._config, context or self._config.model.max_position_embeddings)
        self._silent = SilentRollouts(self._config)
        self._spans = SpanList()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        spare_collector()
        reached("rollout manager ready")

    def process_location(self) -> ProcessLocation:
        return process_location()

    def start(self) -> None:
        """Brings up engines and router; returns when they serve."""
        self._fleet.start()
        if self._fleet.models:
            served = () if self._config.debug.debug_rollout_only else self._config.lora.served_adapters
            init_http_client(self._config.flat, adapters=served)
            self._share_key()
        reached("engines ready")

    def router_url(self) -> str:
        """The router of the first model."""
        return get_model_url(self._config.router, endpoint="")

    def num_rollout_per_epoch(self) -> int | None:
        return rollouts_per_epoch(self._config, self._data_source)

    def num_rollout(self) -> int | None:
        return rollouts_of_run(self._config, self._data_source)

    def notices(self) -> list[str]:
        """What a user should be told about the data."""
        return [*getattr(self._data_source, "notices", []), *take_notes()]

    def set_train_parallel_config(self, config: dict[str, int], policy: str = DEFAULT) -> None:
        self._policies[policy].parallel_config = config

    def load(self, rollout_id: int) -> None:
        """Restores what there was after a rollout, or at the beginning (-1); recorded ones need nothing."""
        if rollout_id >= 0 and self._config.debug.load_debug_rollout_data is None:
            self._data_source.load(rollout_id)
            if self._answers is not None:
                self._answers.resume(rollout_id)

    def generate(self, rollout_id: int, updates_ahead: int = 0) -> Generated | list[Any]:
        """One rollout.

        Args:
            updates_ahead: weight updates that will come before it is trained on.

        Returns:
            What there is to tell of it; with a trainer that and the train shard of each data-parallel rank,
            of one policy after the other, an answer each.
        """
        start = time.monotonic()
        clock.ahead = updates_ahead
        self._fleet.begin_rollout(rollout_id)
        gpus = self._fleet.gpus or None
        if self._answers is not None:
            self._answers.begin(rollout_id, self._data_source)
        with self._spans.measure("rollout", rollout=rollout_id):
            output = self._samples(rollout_id)
        seconds = time.monotonic() - start
        samples = flatten_samples(output.samples)
        recording = self._config.debug.load_debug_rollout_data
        self._check(
            f"--load-debug-rollout-data {recording}" if recording else describe(self._rollout_fn), samples
        )
        name_groups(self._config, output.samples, samples)
        save_debug_rollout_data(
            self._config.debug.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=False
        )
        trained = trained_samples(self._config, samples)
        of_policies = self._policies.split(trained)
        for name, own in of_policies.items():
            self._policies[name].check_batch(describe(self._rollout_fn), own)
        metrics = rollout_log_metrics(rollout_id, self._config, trained, output.metrics, seconds, gpus)
        with self._spans.measure("convert", rollout=rollout_id):
            shards, of_batch = self._policies.to_train_shards(of_policies, self._data_source)
        unsaved = self._save_state(rollout_id)
        metrics |= of_batch | data_metrics(self._data_source) | self._fleet.metrics()
        metrics |= take_logged("rollout", "train")
        if self._answers is not None:
            metrics |= self._answers.end(self._data_source)
        warnings = take_notes() + self._silent.warnings(trained)
        spans = self._taken(self._spans, samples)
        generated = Generated(metrics, warnings, spans, self.data_state(), unsaved)
        return [generated, *shards] if shards else generated

    def data_state(self) -> DataState | None:
        """What another manager goes on from; None where none is started, or the data source does not tell."""
        return state_now(self._data_source) if self._config.fault_tolerance.use_fault_tolerance else None

    def restore(self, state: DataState, after: int | None = None) -> None:
        """Goes on from what another manager told by `data_state`; after a rollout that is gone back to."""
        self._data_source.load_state_dict(state)
        if self._answers is not None:
            self._answers.read() if after is None else self._answers.resume(after)

    def engine_processes(self) -> list[tuple[str, ProcessLocation]]:
        """Name and place of processes that hold memory, and are not gone as soon as this one is."""
        return self._fleet.processes()

    def ask_membership(self, method: str, *arguments: Any) -> tuple[Any, Members]:
        """What the fleet's `Membership` answers, and who belongs to the fleet from then on."""
        return self._fleet.membership.ask(method, *arguments)

    def eval(self, rollout_id: int) -> tuple[dict[str, Any], list[Span]]:
        """Evaluates every data set of ``--eval-prompt-data`` or ``--eval-config``.

        Returns:
            The metrics, and spans if they are collected.
        """
        call = lambda: call_rollout_fn(
            self._eval_fn, self._config.flat, rollout_id, self._data_source, evaluation=True
        )
        start = time.monotonic()
        spans = SpanList()  # a rollout may be under way
        with spans.measure("eval", rollout=rollout_id):
            output: RolloutFnEvalOutput = self._watched(call, f"evaluation at rollout {rollout_id}")
        seconds = time.monotonic() - start
        samples = evaluated_samples(output)
        self._check(describe(self._eval_fn), samples)
        return report_of(self._config, rollout_id, output, seconds), self._taken(spans, samples)

    def want_evaluation(self) -> None:
        """Has the model of ``--eval-model`` take the next weight update."""
        self._fleet.models[self._config.evaluation.eval_model or ""].wanted = True

    def beside(self) -> Beside:
        """What an evaluation by the model of ``--eval-model`` needs to know of it."""
        return beside(self._config, self._fleet.models[self._config.evaluation.eval_model or ""])

    def check(self) -> None:
        """Raises what the fleet's watch has found to end the run, if anything."""
        self._fleet.check()

    def updatable_engines(
        self, suspicious: bool = False, policy: str = DEFAULT
    ) -> tuple[list[EngineEndpoint], int]:
        """The engines to send a policy's weights to, after dead ones have been replaced, and a number.

        The number changes when an engine was replaced, even by one at the same address.

        Args:
            suspicious: one of them seems to have died just now, so wait a while for a death to be seen.
        """
        self._fleet.check()
        clock.begin_update()
        self._fleet.membership.begin_update()
        if self._fleet.tolerates:
            self._fleet.recover(SUSPICION if suspicious else 0.0)
        self._share_key()
        endpoints = self._fleet.endpoints_of(policy)
        if not endpoints:  # then nobody tells of its end
            self._fleet.membership.end_update()
        return endpoints, self._fleet.launches_of(policy)

    def weights_updated(self, version: int, policy: str = DEFAULT) -> None:
        """All engines of a policy have been sent ``version``; refuses to go on if one serves another."""
        self._fleet.admit(str(version), policy)
        self._policies[policy].weight_version = str(version)
        clock.end_update(version)

    def probe_tokens(self, policy: str = DEFAULT) -> list[int]:
        """The ids of the text by which the served policy is judged."""
        return probe_tokens(self._policies[policy].config)

    def check_policy(
        self, tokens: list[int], expected: list[float], adapter: str | None = None, policy: str = DEFAULT
    ) -> None:
        """Refuses to go on if an engine's log-probs of a text are not the trainer's."""
        self._fleet.check_policy(tokens, expected, adapter, policy)

    def offload(self) -> None:
        self._fleet.release()

    def onload(self, tags: list[str]) -> None:
        self._fleet.resume(tags)

    def dispose(self) -> None:
        self._fleet.stop()

    def _share_key(self) -> None:
        """User code may talk to engines directly."""
        for url in self._fleet.urls:
            share_key_with(url)

    def _samples(self, rollout_id: int) -> RolloutFnTrainOutput:
        if self._config.debug.load_debug_rollout_data:
            samples = load_debug_rollout_data(
                self._config.debug.load_debug_rollout_data,
                rollout_id=rollout_id,
                subsample_ratio=self._config.debug.load_debug_rollout_data_subsample,
            )
            return RolloutFnTrainOutput(samples)
        call = lambda: call_rollout_fn(
            self._rollout_fn, self._config.flat, rollout_id, self._data_source, evaluation=False
        )
        return self._watched(call, f"rollout {rollout_id}")

    def _watched(self, call: Callable[[], Any], what: str) -> Any:
        """Runs ``call`` beside the fleet's watch: a failure ends it, and so does the deadline."""
        with self._fleet.serving():
            try:
                return self._await(self._pool.submit(call), what)
            except SystemExit as error:
                # Ray takes it for the wish of this process to end.
                raise RuntimeError(f"{what}: its function called sys.exit({error.code!r})") from error

    def _await(self, future: Future[Any], what: str) -> Any:
        deadline = time.monotonic() + self._config.cluster.rollout_timeout
        while True:
            try:
                return future.result(timeout=POLL)
            except FutureTimeout:
                if future.done():  # its own TimeoutError, or it ended just now
                    return future.result()
                self._fleet.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{what}: not finished after {self._config.cluster.rollout_timeout:.0f} s"
                    ) from None

    def _check(self, origin: str, samples: list[Sample]) -> None:
        check_samples(origin, samples)
        for name, own in self._policies.split(trained_samples(self._config, samples)).items():
            self._policies[name].check_versions(own)

    def _taken(self, spans: SpanList, samples: list[Sample]) -> list[Span]:
        return [*spans.take(), *sample_spans(samples)] if self._config.debug.collects_spans else []

    def _save_state(self, rollout_id: int) -> str | None:
        """Saves the data position with the rollout whose checkpoint will need it; why that failed, if it did.

        Here and not in the loop, because the asynchronous loop draws the prompts of the next rollout
        before it saves this one.
        """
        config, per_epoch = self._config, self.num_rollout_per_epoch()
        if not config.checkpoints.save or not should_run_periodic_action(
            rollout_id, config.checkpoints.save_interval, per_epoch, config.data.num_rollout
        ):
            return None
        try:
            self._data_source.save(rollout_id)
        except (OSError, RuntimeError) as error:
            if not is_write_error(error):
                raise
            return f"the position in the data could not be saved: {error}"
        return None
