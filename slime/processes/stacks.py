"""What a process that hangs is in: its stacks, by py-spy where that is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

_SECONDS = 20.0


def stacks(pid: int) -> str:
    """All threads of a Python process of this user, its innermost calls first, or why they cannot be had."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    return done.stdout.strip() or f"py-spy: {done.stderr.strip().partition(chr(10))[0]}"
