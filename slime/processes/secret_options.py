"""Options that do not stand in a command line, which every user of the machine can read.

    argv, env = hide_options([sys.executable, "-m", "server", "--port=1", "--api-key=K"])

``argv`` runs this module, which gives ``server`` the rest of its options from the environment. That is
readable for this user only, and not handed on to what the server starts.

    python -m slime.processes.secret_options MODULE [OPTION ...]
"""

import json
import os
import runpy
import sys
from collections.abc import Sequence

from slime.utils.redaction import is_secret

VARIABLE = "SLIME_SECRET_OPTIONS"


def hide_options(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the change to its environment; the command as it is if it holds no secret.

    Args:
        argv: ``[python, "-m", module, *options]``, options written as ``--name=value`` or
            ``--name value ...``.
    """
    shown: list[str] = []
    hidden: list[str] = []
    of_secret = False
    for word in argv[3:]:
        if word.startswith("--"):
            of_secret = is_secret(word.split("=", 1)[0])
        (hidden if of_secret else shown).append(word)
    if not hidden:
        return list(argv), {}
    return [*argv[:2], __name__, argv[2], *shown], {VARIABLE: json.dumps(hidden)}


def main() -> None:
    """Becomes the server, as ``python -m MODULE`` would."""
    hidden = json.loads(os.environ.pop(VARIABLE))
    module = sys.argv[1]
    sys.argv[:] = [module, *sys.argv[2:], *hidden]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
