"""Starts a run from the command line, and leaves an empty machine behind."""

import logging
import os
import sys
import tempfile
import traceback
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.arguments import UsageError, parse_args
from slime.arguments.core.group import Rule
from slime.arguments.core.runtime_context import with_context
from slime.config.check import CheckConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.run import RunConfig, filled, run_config
from slime.observability import phases
from slime.observability.startup import reached
from slime.processes.exclusive import DirectoryUnusable, exclusive
from slime.processes.termination import end_on_sigterm, leave, putting_away, was_terminated
from slime.ray.ending import CannotStart, cause, exit_status, full_disks
from slime.ray.trainer_snapshots import snapshot_directory

if TYPE_CHECKING:  # it imports torch
    from slime.check import Report
    from slime.observability.spans import SpanSink
    from slime.observability.tracking import Tracker
    from slime.ray.setup import Groups

logger = logging.getLogger(__name__)

Loop = Callable[..., None]

_METRICS_TIMEOUT = 2.0  # seconds for the rollout side to say which engines and routers there are
_PUTTING_AWAY = 6.0  # seconds after SIGTERM; who sends it kills ten seconds later, often


def main(
    loop: Loop,
    refuse: Rule = lambda args: iter(()),
    notes: Callable[[Namespace], Iterable[str]] = lambda args: (),
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, runs ``loop(config, actor, critic, rollout, log)`` and exits.

    Whether the loop ends, fails or is interrupted, every process of the run is stopped. A failure's
    cause is the last line on the screen, and the exit status is 1 (130 after Ctrl-C). SIGTERM ends it within
    seconds, with status 143.

    With ``--check`` it prints what the run would need instead, and exits with 0 if it would start.

    Args:
        refuse: yields in a line each why this loop cannot run with these flags; then it exits with 2.
        notes: lines about what this loop does with these flags.
        argv: words of the command line; default ``sys.argv``.
    """
    end_on_sigterm()
    words = sys.argv[1:] if argv is None else list(argv)
    reports: list[Report] = []
    phases.show("checking flags, model and data")
    try:
        args = parse_args(
            argv=words, show=lambda args: reports.extend(_shown_if_checked(args)), refuse=refuse
        )
    except SystemExit:
        phases.end()
        raise
    for note in notes(args):
        print(f"note: {note}", file=sys.stderr)
    config = run_config(args)
    if config.check.check:
        phases.end()
        _show_totals(reports)
        raise SystemExit(_fits([line for report in reports for line in report.misfits]))
    reached("arguments checked")
    address = os.environ.get("RAY_ADDRESS")
    phases.reached("flags are in order", then=f"joining Ray at {address}" if address else "starting Ray")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        status = _run(config, loop, lambda: _keep_record(args, words))
    except SystemExit as exit_:
        status = exit_status(exit_)
    _leave(status)


def _shown_if_checked(args: Namespace) -> "Sequence[Report]":
    """Prints the page of ``--check`` and returns what it says.

    Also where data is missing it says what the run would need.
    """
    if not filled(CheckConfig, args).check:
        return ()
    from slime.check import page, report

    found = report(run_config(args))
    print(page(found), flush=True)
    return [found]


def _show_totals(reports: "Sequence[Report]") -> None:
    from slime.check import totals

    if len(reports) > 1:
        print(totals(reports), flush=True)


def _fits(misfits: Sequence[str]) -> int:
    """Exit status of ``--check`` for flags that are in order: 0, or 1 if a GPU is too small."""
    for line in misfits[:1]:
        print(f"error: {line}", file=sys.stderr)
    return 1 if misfits else 0


def _keep_record(args: Namespace, words: Sequence[str]) -> None:
    """Writes all flags into the run's directory, if it has one."""
    from slime.arguments.config_record import directory_of, write_record

    if directory := directory_of(args):
        write_record(directory, words)


def _run(config: RunConfig, loop: Loop, keep_record: Callable[[], None]) -> int:
    try:
        try:
            _session(config, loop, keep_record)
        finally:
            phases.end()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (DirectoryUnusable, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if was_terminated():  # whatever fails now, that is why
            leave()
        if not isinstance(error, CannotStart):
            traceback.print_exc()
        print(f"\nerror: {cause(error)}{full_disks(_written_to(config))}", file=sys.stderr)
        return 1
    return 0


def _written_to(config: RunConfig) -> list[str | None]:
    """Where a run leaves much: checkpoints, profiles, and what its processes say."""
    return [config.checkpoints.save, config.profiling.tensorboard_dir, tempfile.gettempdir(), "/dev/shm"]


def _session(config: RunConfig, loop: Loop, keep_record: Callable[[], None]) -> None:
    # Imported late: bad flags are answered without waiting for them.
    from slime.ray.cluster import ray_cluster
    from slime.ray.setup import sides

    if config.engines.rollout_external:
        from slime.backends.sglang_utils.external import external_engines

        external_engines(config)  # one that is not there, or another one, is told before anything starts
    _require_collector(config.debug.otlp_endpoint)
    with _own_save_directory(config.checkpoints), snapshot_directory(config) as memory:
        config = run_config(with_context(config.flat, trainer_snapshots=memory))
        keep_record()
        with ray_cluster(config):
            reached("Ray up")
            phases.reached("Ray is up", then=f"starting {' and '.join(sides(config))}")
            _in_cluster(config, loop)


def _require_collector(endpoint: str | None) -> None:
    if endpoint is not None:
        from slime.observability.otlp import CollectorError, require_collector

        try:
            require_collector(endpoint)
        except CollectorError as error:
            raise CannotStart(str(error)) from error


def _in_cluster(config: RunConfig, loop: Loop) -> None:
    from slime.observability.console import ConsoleSink
    from slime.observability.policy_log import silent_steps
    from slime.observability.run_log import RunLog
    from slime.observability.tracking import init_tracking
    from slime.ray.addresses import api_key
    from slime.ray.engine_control import engine_control
    from slime.ray.run_page import run_page
    from slime.ray.setup import running_groups

    tracker = init_tracking(config)
    uid = uuid.uuid4().hex
    # A rollout side that starts again has the key of the one before, whose engines trainers take leave of.
    known = {"run_uid": uid, "sglang_api_key": api_key(config)}
    config = run_config(with_context(config.flat, **tracker.context, **known))
    with putting_away(_PUTTING_AWAY):
        try:
            sinks = _span_sinks(config, uid)
            with (
                closing(RunLog(tracker, sinks)) as log,
                run_page(config),
                running_groups(config, log) as groups,
            ):
                _warn_if_done(groups.config, groups.actor.start_rollout_id)
                tracker.add(ConsoleSink(groups.config))
                for watch in silent_steps(groups.config.policies.trained_policies):
                    tracker.add(watch)
                log.start_loop()
                with engine_control(groups.config, groups.rollout), _carrying(tracker, groups):
                    loop(groups.config, groups.actor, groups.critic, groups.rollout, log)
        finally:
            tracker.finish()


def _carrying(tracker: "Tracker", groups: "Groups") -> AbstractContextManager[None]:
    """Has the page of ``--prometheus-port`` show what engines and routers measure."""
    if tracker.prometheus is None:
        return nullcontext()
    find = partial(groups.rollout.ask_fleet, "metrics_pages", timeout=_METRICS_TIMEOUT)
    return tracker.prometheus.carrying(find, groups.config.router.sglang_api_key)


def _span_sinks(config: RunConfig, uid: str) -> "list[SpanSink]":
    """Where spans go, as the flags ask."""
    from slime.observability.spans import TraceFile
    from slime.observability.tracking import metrics_path

    sinks: list[SpanSink] = [TraceFile(Path(config.debug.trace))] if config.debug.trace else []
    if config.debug.otlp_endpoint is not None:
        from slime.observability.otlp import OtlpSpans

        name = config.tracking.run_name or metrics_path(config).resolve().parent.name
        sinks.append(OtlpSpans(config.debug.otlp_endpoint, uid, name))
    return sinks


def _warn_if_done(config: RunConfig, start: int) -> None:
    if config.data.num_rollout and start >= config.data.num_rollout:
        print(
            f"nothing to do: {config.data.num_rollout} of {config.data.num_rollout} rollouts are done "
            f"(--load {config.checkpoints.load}); raise --num-rollout to go on"
        )


def _own_save_directory(config: CheckpointConfig) -> AbstractContextManager[None]:
    """A second run in the same place would resume from this one's checkpoints and overwrite them."""
    if config.save is None:
        return nullcontext()
    return exclusive(Path(config.save) / ".in_use", f"--save {config.save}")


def _leave(status: int) -> None:
    """Exits without waiting for foreign threads (Ray's, wandb's), which may outlive a failed run."""
    sys.stdout.flush()
    sys.stderr.flush()
    if was_terminated():
        leave()
    os._exit(status)
