"""``--token-log-dir`` and what it needs."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.nucleus import replays_nucleus
from slime.arguments.groups.rollout import REPLAY_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.arguments.validate.outputs import bad_output
from slime.config.token_log import LOGGED_FUNCTIONS, TokenLogConfig

_SLEEPS = "slime.rollout.sleep_rollout.sleep"
_ANSWERS_NOTHING = (SFT_ROLLOUT_FUNCTION, REPLAY_FUNCTION, _SLEEPS)


def notes(args: Namespace) -> Iterator[str]:
    """Answers that are not logged."""
    own = args.custom_generate_function_path
    if args.token_log_dir is not None and own not in (None, *LOGGED_FUNCTIONS):
        yield f"--token-log-dir {args.token_log_dir}: answers of {own} are not logged, and begin anew"


def contradictions(args: Namespace) -> Iterator[str]:
    """Runs in which no manager takes another's place, or whose answers are more than the log keeps."""
    if args.token_log_dir is None:
        return
    name = f"--token-log-dir {args.token_log_dir}"
    if not args.use_fault_tolerance:
        yield f"{name}: a rollout manager that is lost ends the run (wanted: --use-fault-tolerance)"
    if args.rollout_function_path in _ANSWERS_NOTHING or args.debug_train_only:
        found = "--debug-train-only" if args.debug_train_only else args.rollout_function_path
        yield f"{name}: {found} asks engines for no answers"
    if args.policies is not None:
        yield f"{name}: a sample of several policies cannot be taken up again (wanted: without --policies)"
    if args.use_rollout_routing_replay:
        yield f"{name}: does not keep the experts that --use-rollout-routing-replay needs"
    if replays_nucleus(args):
        yield f"{name}: does not keep the nuclei that --rollout-top-p and --rollout-top-k need"


def missing(args: Namespace) -> Iterator[str]:
    """A directory that cannot be written to."""
    yield from bad_output(args, "token_log_dir", is_directory=True)


CONFIG_GROUP = ConfigGroup(
    {"token log": TokenLogConfig}, notes=notes, contradictions=contradictions, missing=missing
)
