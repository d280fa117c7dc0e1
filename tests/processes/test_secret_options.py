import json
import os
import subprocess
import sys
from pathlib import Path

from slime.processes.secret_options import VARIABLE, hide_options

ROOT = Path(__file__).parents[2]
SERVER = """
import json, multiprocessing, os, sys

def what_a_child_sees(_):
    return {SECRET!r} in os.environ

if __name__ == "__main__":
    cmdline = open("/proc/self/cmdline").read().split("\\0")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # as SGLang starts its schedulers
        (inherited,) = pool.map(what_a_child_sees, [0])
    print(json.dumps([__name__, sys.argv[1:], cmdline, inherited]))
"""


def test_secret_options_reach_the_server_and_no_command_line(tmp_path):
    (tmp_path / "server.py").write_text(SERVER.replace("{SECRET!r}", repr(VARIABLE)))
    shown = ["--port=1", "--names", "a", "b"]
    keys = ["--api-key=K 1", "--control-plane-api-keys", "id:K 2", "id:K 3"]
    argv, env = hide_options([sys.executable, "-m", "server", *shown, *keys, "--flag"])
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    process = subprocess.run(
        argv, env={**os.environ, **env, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    name, seen, cmdline, inherited = json.loads(process.stdout)
    assert name == "__main__" and not inherited
    assert seen == [*shown, "--flag", *keys]
    assert not any("K " in word for word in cmdline)


def test_a_command_without_secrets_stays_as_it_is():
    argv = [sys.executable, "-m", "server", "--port=1", "--tls-key-path=f", "--max-total-tokens=9"]
    assert hide_options(argv) == (argv, {})
