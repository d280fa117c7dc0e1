import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.processes.exclusive import DirectoryUnusable, exclusive

HOLDER = """
import sys, time
from pathlib import Path
from slime.processes.exclusive import exclusive
with exclusive(Path(sys.argv[1]), "--save x"):
    print("held", flush=True)
    time.sleep(100)
"""


def test_one_process_at_a_time_and_none_after_its_death(tmp_path):
    lock = tmp_path / "new" / ".in_use"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(DirectoryUnusable, match=f"--save x: in use by process {holder.pid} "),
            exclusive(lock, "--save x"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    with exclusive(lock, "--save x"):
        assert lock.read_text() == str(os.getpid())


def test_a_place_that_cannot_be_written_is_named():
    with (
        pytest.raises(DirectoryUnusable, match=r"--save /proc/x: cannot be written to \("),
        exclusive(Path("/proc/x/.in_use"), "--save /proc/x"),
    ):
        pass
