"""scripts/ray-cluster.sh starts Ray on every node, hides the token, and leaves nothing behind."""

import os
import select
import subprocess
from pathlib import Path

import pytest

from tests.each import hold_each
from tests.page_runs import printed

SCRIPT = Path(__file__).parents[2] / "scripts/ray-cluster.sh"
TOKEN = "0123456789abcdef"
FAKES = {
    # Says who it is, then is there until it is ended.
    "ray": 'printf "%s\\t%s\\t%s\\n" "$$" "$RAY_AUTH_TOKEN" "$*" >>"$LOG/ray"; exec sleep 1000',
    # Logs in to this machine, without the variables of the other one.
    "ssh": 'printf "%s\\n" "$*" >>"$LOG/ssh"; exec env -u RAY_AUTH_TOKEN sh -c "${@: -1}"',
    # Makes the token, or waits for Ray on as many nodes as there should be.
    "python": 'if [ "$1" = -c ]; then echo 0123456789abcdef; exit; fi\n'
    'case "$1" in */train*.py) echo "$RAY_ADDRESS $*"; exit ;; esac; echo "$*" >"$LOG/wait"\n'
    'until [ "$(wc -l <"$LOG/ray" 2>/dev/null || echo 0)" -eq "$3" ]; do sleep 0.05; done',
    # What runs on the cluster.
    "slime": 'echo "$RAY_ADDRESS $*"',
}


@pytest.fixture
def cluster(tmp_path):
    """``cluster(*words)`` runs the script with programs that stand for ssh and ray."""
    bin_dir = tmp_path / "venv/bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "activate").write_text("")
    for name, text in FAKES.items():
        (bin_dir / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (bin_dir / name).chmod(0o755)

    def run(*words):
        env = os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}", "LOG": str(tmp_path)}
        env |= {"VIRTUAL_ENV": str(tmp_path / "venv"), "RAY_PORT": "7001"}
        command = ["bash", str(SCRIPT), *words]
        return subprocess.run(
            command, cwd=SCRIPT.parents[1], env=env, capture_output=True, text=True, timeout=150
        )

    return run


def started(tmp_path):
    """Process, token and words of each start of Ray."""
    return [line.split("\t") for line in (tmp_path / "ray").read_text().splitlines()]


def ended(process):
    """Whether a process is gone within a minute."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60.0)[0])
    finally:
        os.close(handle)


def test_the_command_runs_on_a_cluster_that_ends_with_it(cluster, tmp_path):
    show = 'echo "$RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN"; exit 3'
    done = cluster("10.0.0.1", "second", "third", "--", "bash", "-c", show)
    assert (done.returncode, done.stdout) == (3, f"10.0.0.1:7001 token {TOKEN}\n"), done.stderr
    words = [line[2] for line in started(tmp_path)]
    assert sorted(words) == [
        *["start --block --address 10.0.0.1:7001"] * 2,
        "start --head --block --node-ip-address 10.0.0.1 --port 7001",
    ]
    assert {line[1] for line in started(tmp_path)} == {TOKEN}
    assert (tmp_path / "wait").read_text().split()[1:] == ["--nodes", "3", "--timeout", "300"]
    for process, _, _ in started(tmp_path):
        assert ended(int(process))


def test_commands_of_pages_run_on_all_of_their_nodes(cluster, tmp_path):
    def check(command):
        (tmp_path / "ray").unlink(missing_ok=True)
        first, *words = command.words[2:]
        done = cluster(first, *words)
        address, _, said = done.stdout.partition(" ")
        assert (done.returncode, address) == (0, f"{first}:7001"), done.stderr
        behind = words[words.index("--") + 1 :]
        assert said.split()[0] == "train" if behind[0] == "slime" else "/train" in said.split()[0]
        assert len(started(tmp_path)) == 1 + words.index("--")

    hold_each(printed("bash scripts/ray-cluster.sh"), check, least=2)


def test_the_token_stands_in_no_command_line(cluster, tmp_path):
    assert cluster("10.0.0.1", "second", "--", "true").returncode == 0
    assert "-o BatchMode=yes -- second bash -c" in (tmp_path / "ssh").read_text()
    assert TOKEN not in (tmp_path / "ssh").read_text()


@pytest.mark.parametrize(
    "words", [(), ("10.0.0.1",), ("10.0.0.1", "--", "true"), ("10.0.0.1", "second", "--")]
)
def test_what_is_missing_is_said(cluster, words):
    done = cluster(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: wanted: ray-cluster.sh ADDRESS NODE... -- COMMAND\n"
