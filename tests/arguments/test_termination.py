"""A run that is told to end before it has begun: see also tests/processes/test_termination.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HANGS = 120  # seconds


@pytest.fixture
def slow_reward(tmp_path: Path) -> Path:
    """A folder with a reward whose import takes for ever, once it has made the file `started`."""
    lines = ("import ctypes, pathlib", "pathlib.Path(__file__).with_name('started').touch()")
    (tmp_path / "slow_reward.py").write_text("\n".join([*lines, "ctypes.CDLL(None).sleep(600)\n"]))
    return tmp_path


@pytest.mark.parametrize("to_group", [False, True])
def test_train_py_is_ended_while_it_looks_at_its_arguments(words, slow_reward: Path, to_group: bool) -> None:
    command = [sys.executable, "train.py", *words(), "--custom-rm-path", "slow_reward.reward"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(slow_reward)])}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (slow_reward / "started").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert process.returncode == 143
    assert err == "terminated by SIGTERM\n"
