"""The files of scripts/cluster: SLURM's starts Ray on every node of a job, the others can be read."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.page_runs import printed
from tests.scripts.test_ray_cluster import FAKES, TOKEN, ended, started

FOLDER = Path(__file__).parents[2] / "scripts/cluster"
OPTIONS = r"--(job-name|nodes|ntasks-per-node|gpus-per-node|exclusive|output)(?:[= ]|$)"
"""Options of sbatch, as far as the file and the page give any."""
SLURM = {
    "scontrol": 'printf "node%s\\n" 1 2 3',
    # Runs the command as often as it has tasks, on this machine; the options are noted.
    "srun": 'tasks=1; printf "%s\\n" "$*" >>"$LOG/srun"\n'
    'while [ "${1#--}" != "$1" ]; do [ "${1#--ntasks=}" = "$1" ] || tasks="${1#--ntasks=}"; shift; done\n'
    'for i in $(seq 2 "$tasks"); do "$@" & done; trap \'kill $(jobs -p)\' TERM; "$@" & wait',
    "hostname": "echo 10.0.0.1 172.17.0.1",
    "slime": 'echo "$RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN $*"; exit 3',
}


@pytest.fixture
def job(tmp_path):
    """Returns a function that runs the script in a job of three nodes."""
    bin_dir = tmp_path / "venv/bin"
    bin_dir.mkdir(parents=True)
    for name, text in (FAKES | SLURM).items():
        (bin_dir / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (bin_dir / name).chmod(0o755)

    def run(*words, **variables):
        env = os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}", "LOG": str(tmp_path)}
        env |= {"VIRTUAL_ENV": str(tmp_path / "venv"), "RAY_PORT": "7001", "SLURM_JOB_NODELIST": "node[1-3]"}
        command = ["bash", str(FOLDER / "slurm.sbatch"), *words]
        return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=150)

    return run


def test_a_slurm_job_is_a_cluster_as_long_as_its_command_runs(job, tmp_path) -> None:
    (command,) = printed("sbatch")
    place = command.words.index(str((FOLDER / "slurm.sbatch").relative_to(FOLDER.parents[1])))
    behind = command.words[place + 1 :]
    assert behind[0] == "slime" and re.match(OPTIONS, command.words[1])
    done = job(*behind)
    said = f"10.0.0.1:7001 token {TOKEN} {' '.join(behind[1:])}\n"
    assert (done.returncode, done.stdout) == (3, said), done.stderr
    assert sorted(line[2] for line in started(tmp_path)) == [
        *["start --block --address 10.0.0.1:7001"] * 2,
        "start --head --block --node-ip-address 10.0.0.1 --port 7001",
    ]
    assert (tmp_path / "wait").read_text().split()[1:] == ["--nodes", "3", "--timeout", "300"]
    calls = (tmp_path / "srun").read_text()
    assert "--overlap --nodes=2 --ntasks=2 --exclude=node1 ray start" in calls and TOKEN not in calls
    for process, token, _ in started(tmp_path):
        assert token == TOKEN and ended(int(process))


def test_slurm_reads_the_directives() -> None:
    """It stops at the first line that is neither a comment nor empty."""
    head = re.split(r"^[^#\n]", (FOLDER / "slurm.sbatch").read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    directives = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    assert len(directives) == (FOLDER / "slurm.sbatch").read_text().count("#SBATCH") == 6
    assert [directive for directive in directives if not re.match(OPTIONS, directive)] == []


def test_what_a_slurm_job_lacks_is_said(job) -> None:
    for words, variables, lack in (
        ((), {}, "wanted: sbatch scripts/cluster/slurm.sbatch COMMAND"),
        (("true",), {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        (("true",), {"VIRTUAL_ENV": ""}, "no environment is active"),
    ):
        done = job(*words, **variables)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {lack}")


def test_the_file_for_kubernetes_has_as_many_gpus_on_each_node() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [set(pod) >= {"rayStartParams", "template"} for pod in pods] == [True, True]
    for pod in pods:
        mounted = {mount["name"] for mount in pod["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
    limits = [pod["template"]["spec"]["containers"][0]["resources"]["limits"] for pod in pods]
    assert [limit["nvidia.com/gpu"] for limit in limits] == [8, 8]
    assert spec["entrypoint"].startswith("slime train ")


def test_the_commands_for_skypilot_are_bash() -> None:
    text = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=text[part], text=True, check=False).returncode == 0
    assert text["secrets"] == {"RAY_AUTH_TOKEN": None}
