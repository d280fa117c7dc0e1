"""One half of the loop alone, what passes between the halves, and the self-checks of a run."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import is_zipfile

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rollout import REPLAY_FUNCTION, replays
from slime.arguments.validate.outputs import bad_output, bad_template
from slime.config.debug import CiConfig, DebugConfig
from slime.utils.addresses import is_web_address


def trains_only(args: Namespace) -> bool:
    """Whether the run has no engines: it was told so, or there is a dump to train on.

    The same before and after ``derive``.
    """
    return args.debug_train_only or args.load_debug_rollout_data is not None


def derive(args: Namespace) -> None:
    """What a dump implies, and where the files of ``--dump-details`` go."""
    args.debug_train_only = trains_only(args)
    if args.dump_details is not None:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"


def contradictions(args: Namespace) -> Iterator[str]:
    """Halves that leave nothing, and checks of what SFT does not have."""
    if args.debug_train_only and args.debug_rollout_only:
        yield "--debug-train-only and --debug-rollout-only: only one of them at a time"
    if args.load_forge_rollout_data is None and replays(args):
        yield f"--load-forge-rollout-data: missing (wanted: the dump that {REPLAY_FUNCTION} replays)"
    if args.load_forge_rollout_data is not None and not replays(args):
        yield f"--load-forge-rollout-data: needs --rollout-function-path {REPLAY_FUNCTION}"
    if args.ci_test and args.loss_type == "sft_loss":
        yield "--ci-test: --loss-type sft_loss has no log-probs of engine or old policy to check"
    if args.save_debug_log_probs and not (args.save_debug_train_data or args.dump_details):
        yield "--save-debug-log-probs: needs --save-debug-train-data or --dump-details, which say where"
    if args.otlp_endpoint is not None:
        yield from _bad_collector(args.otlp_endpoint)


def _bad_collector(url: str) -> Iterator[str]:
    """No address, or one that holds a key: command lines are seen by others, and kept in records."""
    if not is_web_address(url):
        yield f"--otlp-endpoint {url}: is no web address (wanted: http://HOST:4318)"
        return
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        yield (
            f"--otlp-endpoint {parts.scheme}://{parts.hostname}: has more than host, port and path "
            "(wanted: keys in OTEL_EXPORTER_OTLP_HEADERS)"
        )


def missing(args: Namespace) -> Iterator[str]:
    """Places of dumps, those to write and the one to train on."""
    yield from bad_output(args, "dump_details", is_directory=True)
    if args.dump_details is None:
        yield from bad_output(args, "save_debug_rollout_data", is_directory=False)
        yield from bad_output(args, "save_debug_train_data", is_directory=False)
    yield from bad_output(args, "trace", is_directory=False)
    yield from _missing_replay(args.load_forge_rollout_data, args.start_rollout_id or 0)
    dump, first = args.load_debug_rollout_data, args.start_rollout_id
    if dump is None:
        return
    if reason := bad_template(dump):
        yield f"--load-debug-rollout-data {dump}: {reason}"
    elif first is not None and not Path(dump.format(rollout_id=first)).is_file():
        yield f"--load-debug-rollout-data {dump}: no such file for rollout {first}"
    elif first is not None and not is_zipfile(dump.format(rollout_id=first)):
        yield f"--load-debug-rollout-data {dump}: the file for rollout {first} is not a dump, or is cut off"


def _missing_replay(template: str | None, first: int) -> Iterator[str]:
    """No dump for the first rollout, nor for rollout 0 that would take its place."""
    if template is None:
        return
    if reason := bad_template(template):
        yield f"--load-forge-rollout-data {template}: {reason}"
        return
    paths = [Path(template.format(rollout_id=number)) for number in (first, 0)]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        yield f"--load-forge-rollout-data {template}: no such file for rollout {first}"
    elif not is_zipfile(found):
        yield f"--load-forge-rollout-data {template}: {found} is not a dump, or is cut off"


CONFIG_GROUP = ConfigGroup(
    {"debug": DebugConfig, "self-checks": CiConfig},
    derive=derive,
    contradictions=contradictions,
    missing=missing,
)
