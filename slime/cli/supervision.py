"""``--supervise``: a run that fails is started again, and goes on from its latest checkpoint."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.arguments import UsageError, validated_args
from slime.arguments.core.config_files import expand
from slime.arguments.groups.run_files import SUPERVISED
from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER
from slime.processes.restarts import Restarts

_BEGIN_ANEW = ("--ckpt-step", "--start-rollout-id", "--finetune")


def wants_supervisor(words: Sequence[str]) -> bool:
    """Whether the command line asks for a supervisor, and this process is not what one has started."""
    return SUPERVISED not in os.environ and "--supervise" in expand(words).words


def supervise(words: Sequence[str]) -> int | None:
    """Runs the command line until it ends well; see `Restarts`.

    Returns:
        The exit status; None if the command line has mistakes, which the run itself tells best.
    """
    given = {word.partition("=")[0] for word in expand(words).words}
    if anew := [name for name in _BEGIN_ANEW if name in given]:
        reason = "would begin there after each failure under --supervise"
        print(f"error: {anew[0]}: {reason} (wanted: the latest checkpoint in --load)", file=sys.stderr)
        return 2
    os.environ[SUPERVISED] = str(os.getpid())
    try:
        args = validated_args(words)
    except UsageError:
        return None
    markers = [Path(place) / CHECKPOINT_MARKER for place in (args.save, args.critic_save) if place]
    command = [sys.executable, "-m", "slime.cli", "train", *words]
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    progress = lambda: [marker.read_text() if marker.is_file() else "" for marker in markers]
    return Restarts(command, environment, progress, args.max_restarts).run()
