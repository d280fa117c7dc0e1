import signal
import subprocess
import sys
import time

from slime.utils.run_reaper import marked_processes

DRIVER = """
import os, subprocess, sys, time
from slime.utils.run_reaper import MARK, start_run_reaper
reaper = start_run_reaper()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print(os.environ[MARK], flush=True)
time.sleep(100)
"""


def test_nothing_outlives_a_killed_driver():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    mark = driver.stdout.readline().strip()
    deadline = time.monotonic() + 20
    while len(marked_processes(mark)) < 2:  # the reaper and the sleeper
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    while marked_processes(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)
