"""Evaluation beside training: an actor whose requests go to engines of their own.

What a process has one of (the abort of a rollout, limits of requests, what user code logs) an evaluation
shares with no rollout that is under way.
"""

import logging
import time
from typing import Any

from slime.arguments.groups.rollout import answers
from slime.config.run import RunConfig
from slime.observability.logging_utils import take_logged
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.observability.rollout_metrics import eval_log_metrics
from slime.observability.spans import Span, SpanList, sample_spans
from slime.ray.beside import Beside
from slime.ray.process_watch import ProcessLocation, process_location
from slime.rollout.base_types import RolloutFnEvalOutput, call_rollout_fn, describe
from slime.rollout.checks import check_samples
from slime.rollout.trained import trained_samples
from slime.rollout.weight_versions import check_weight_versions
from slime.training.conversion import in_order
from slime.utils.allowed_hosts import tell_hosts
from slime.utils.http_utils import init_http_client, share_key_with
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime.utils.weight_clock import clock


def evaluated_samples(output: RolloutFnEvalOutput) -> list[Sample]:
    """The samples of all data sets."""
    return [s for result in output.data.values() for s in in_order(result.get("samples") or [])]


def report_of(
    config: RunConfig, rollout_id: int, output: RolloutFnEvalOutput, seconds: float
) -> dict[str, Any]:
    """Records the samples if ``--save-debug-rollout-data`` asks, and returns the metrics."""
    recorded = config.debug.save_debug_rollout_data, evaluated_samples(output)
    save_debug_rollout_data(*recorded, rollout_id=rollout_id, evaluation=True)
    metrics = eval_log_metrics(rollout_id, config, output.data, output.metrics)
    return metrics | {"perf/eval_time": seconds} | take_logged("eval")


class Evaluator:
    """Evaluates one version after the other.

    Args:
        config: in which the model of ``--eval-model`` is the first one.
    """

    def __init__(self, config: RunConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request
        self._config = config
        tell_hosts(config.rewards.allowed_hosts)
        self._eval_fn = load_function(config.evaluation.eval_function_path)
        # Ours need no data source; that of the rollouts is in another process.
        ours = answers(config.evaluation.eval_function_path)
        self._data_source = None if ours else load_function(config.data.data_source_path)(config.flat)
        clock.keeps_prefixes = config.weight_sync.pause_generation_mode == "in_place"
        init_http_client(config.flat)

    def process_location(self) -> ProcessLocation:
        return process_location()

    def eval(self, rollout_id: int, served: Beside) -> tuple[dict[str, Any], list[Span]]:
        """Evaluates every data set.

        Returns:
            The metrics, and spans if they are collected.

        Raises:
            RolloutError: a sample was made by other weights than those that the engines had been given.
        """
        for url in served.engines:
            share_key_with(url)
        clock.begin_update()
        clock.end_update(int(served.version or 0))
        spans, start = SpanList(), time.monotonic()
        with spans.measure("eval", rollout=rollout_id):
            output = self._output(rollout_id)
        seconds, samples = time.monotonic() - start, evaluated_samples(output)
        self._check(samples, served.version)
        metrics = report_of(self._config, rollout_id, output, seconds)
        taken = [*spans.take(), *sample_spans(samples)] if self._config.debug.collects_spans else []
        return metrics, taken

    def _output(self, rollout_id: int) -> Any:
        args, source = self._config.flat, self._data_source
        try:
            return call_rollout_fn(self._eval_fn, args, rollout_id, source, evaluation=True)
        except SystemExit as error:
            # Ray takes it for the wish of this process to end.
            what = f"evaluation at rollout {rollout_id}"
            raise RuntimeError(f"{what}: its function called sys.exit({error.code!r})") from error

    def _check(self, samples: list[Sample], version: str | None) -> None:
        check_samples(describe(self._eval_fn), samples)
        if version is not None:
            own = trained_samples(self._config, samples)
            check_weight_versions(own, version, allow_older=False)
