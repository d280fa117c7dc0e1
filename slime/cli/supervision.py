"""``--supervise``: a run that fails is started again, and goes on from its latest checkpoint."""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from slime.arguments import UsageError
from slime.arguments.core.config_files import expand
from slime.arguments.core.flag import option_string
from slime.arguments.core.mistakes import Mistakes
from slime.arguments.core.parser import read_words
from slime.arguments.groups.policies import take_first_policy
from slime.arguments.groups.run_files import SUPERVISED
from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER
from slime.processes.restarts import Restarts

_BEGIN_ANEW = ("--ckpt-step", "--start-rollout-id", "--finetune")
_WITHOUT_OPTIMIZER = ("--no-load-optim", "--no-save-optim")


def wants_supervisor(words: Sequence[str]) -> bool:
    """Whether the command line asks for a supervisor, and this process is not what one has started.

    With ``--check`` nothing runs that could fail.
    """
    given = expand(words).words
    return SUPERVISED not in os.environ and "--supervise" in given and "--check" not in given


def supervise(words: Sequence[str]) -> int | None:
    """Runs the command line until it ends well; see `Restarts`.

    Returns:
        The exit status; None if the command line has mistakes, which the run itself tells best.
    """
    expanded, mistakes = expand(words), Mistakes()
    given = {word.partition("=")[0] for word in expanded.words}
    if refusal := _refusal(given):
        return _refused(refusal)
    os.environ[SUPERVISED] = str(os.getpid())
    try:  # the run checks them; here users' code would be imported to stay, with what it takes of a GPU
        mistakes.add(*expanded.mistakes)
        args = read_words(expanded.words, None, mistakes, [])
        mistakes.end()
    except UsageError:
        return None
    for name, own in args.trained_policies.items():
        if refusal := _refusal(given | {option_string(key) for key, value in own.items() if value is True}):
            return _refused(f"--policies {args.policies}: {name}: {refusal}")
    take_first_policy(args)
    places = args.save, args.save and Path(args.save) / "critic", args.critic_save
    markers = [Path(place) / CHECKPOINT_MARKER for place in places if place]
    command = [sys.executable, "-m", "slime.cli", "train", *words]
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    progress = lambda: [marker.stat().st_mtime_ns if marker.is_file() else 0 for marker in markers]
    return Restarts(command, environment, progress, args.max_restarts).run()


def _refused(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _refusal(given: Collection[str]) -> str | None:
    """Flags with which no start goes on where the one before has ended."""
    if anew := [name for name in _BEGIN_ANEW if name in given]:
        reason = "would begin there after each failure under --supervise"
        return f"{anew[0]}: {reason} (wanted: the latest checkpoint in --load)"
    if len(without := [name for name in _WITHOUT_OPTIMIZER if name in given]) == 1:
        reason = "under --supervise no start would have the optimizer of the one before"
        return f"{without[0]}: {reason} (wanted: neither or both of {' and '.join(_WITHOUT_OPTIMIZER)})"
    return None
