"""Launch scripts in Python: what ``scripts/lib/launch.sh`` does in bash, under the original's names.

execute_train(
    train_args="--hf-checkpoint /models/Qwen3-4B --colocate ...",
    num_gpus_per_node=8,
    megatron_model_type="qwen3-4B",
)

A command starts what it says and waits for it. Nothing else on the machine is stopped.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
_NVIDIA_SMI_S = 60.0


@dataclass(frozen=True)
class ExecuteTrainConfig:
    """What a launch script leaves to whoever calls it.

    Attributes:
        num_nodes: above 1 the cluster has to be there already, at ``RAY_ADDRESS``.
        extra_env_vars: ``NAME=VALUE`` words, for every process of the run.
    """

    num_nodes: int = 1
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Runs a training script of this repository to its end.

    Args:
        train_args: flags, split as a shell does.
        megatron_model_type: the name of a file in ``scripts/models`` whose flags come first; None for none.
        before_ray_job_submit: called before the script starts.

    Raises:
        ValueError: no such model, or several nodes without a cluster.
        subprocess.CalledProcessError: the script ended with another status than 0.
    """
    config = config or ExecuteTrainConfig()
    if config.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ValueError(
            f"num_nodes {config.num_nodes}: RAY_ADDRESS is not set (wanted: the address of a Ray cluster "
            "that was started on all nodes)"
        )
    words = [*model_args(megatron_model_type), *shlex.split(train_args)]
    if not any(word.split("=")[0] == "--num-gpus-per-node" for word in words):
        words += ["--num-gpus-per-node", str(num_gpus_per_node)]
    env = dict(word.split("=", 1) for word in shlex.split(config.extra_env_vars)) | dict(extra_env_vars or {})
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    _run([sys.executable, train_script, *words], {"PYTHONUNBUFFERED": "1", **env})


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = "/root",
    hf_checkpoint: str | None = None,
) -> None:
    """Converts a Hugging Face directory to ``DIR_DST/MODEL_NAME_torch_dist``, unless that is there.

    Raises:
        ValueError: ``multinode``; or no such model.
    """
    if multinode:
        raise ValueError("multinode: the converter runs on one node (wanted: False)")
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if target.exists():
        print(f"{target}: exists, is not converted again")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_gpus_per_node)]
    source = hf_checkpoint or f"/root/models/{model_name}"
    paths = ["--hf-checkpoint", source, "--save", str(target)]
    words = [*model_args(megatron_model_type), *paths, *shlex.split(extra_args)]
    _run([*command, "tools/convert_hf_to_torch_dist.py", *words], {})


def model_args(name: str | None) -> list[str]:
    """The flags of ``scripts/models/NAME.sh``.

    Raises:
        ValueError: there is no such file.
    """
    if name is None:
        return []
    script = REPOSITORY / f"scripts/models/{name}.sh"
    if not script.is_file():
        known = sorted(path.stem for path in script.parent.glob("*.sh"))
        raise ValueError(f"megatron_model_type {name}: wanted one of {', '.join(known)}")
    print_all = 'source "$1" && for word in "${MODEL_ARGS[@]}"; do printf "%s\\0" "$word"; done'
    done = subprocess.run(
        ["bash", "-c", print_all, "bash", str(script)], check=True, text=True, capture_output=True
    )
    return done.stdout.split("\0")[:-1]


def hf_download_dataset(full_name: str, data_dir: str = "/root/datasets") -> None:
    """Downloads ``OWNER/NAME`` of the Hugging Face hub to ``DATA_DIR/NAME``."""
    target = Path(data_dir) / full_name.rpartition("/")[2]
    _run(["hf", "download", "--repo-type", "dataset", full_name, "--local-dir", str(target)], {})


def get_default_wandb_args(
    test_file: str, run_name_prefix: str | None = None, run_id: str | None = None
) -> str:
    """Flags that report a launch script's run to wandb if ``WANDB_API_KEY`` is set, else none."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    name = "_".join(filter(None, [run_name_prefix, run_id or create_run_id()]))
    return f"--use-wandb --wandb-project slime-{Path(test_file).stem} --wandb-group {name} "


def create_run_id() -> str:
    """The present second."""
    return datetime.now(UTC).strftime("%y%m%d-%H%M%S")


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Whether an environment variable is 1 or true."""
    return os.environ.get(name, default).lower() in ("1", "true")


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Runs a command of bash from the repository, and prints it.

    Returns:
        What it wrote to standard output, if that is captured.

    Raises:
        subprocess.CalledProcessError: it ended with another status than 0.
    """
    print(f"EXEC: {cmd}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd],
        check=True,
        text=True,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE if capture_output else None,
    )
    return done.stdout if capture_output else None


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Makes a directory like another one; what it has beyond that stays."""
    exec_command(
        f"mkdir -p {shlex.quote(path_dst)} && "
        f"rsync -a --info=progress2 {shlex.quote(path_src + '/')} {shlex.quote(path_dst)}"
    )


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Writes a checkpoint in fp8 as one in bf16, unless it is there."""
    if (Path(path_dst) / "model.safetensors.index.json").exists():
        print(f"{path_dst}: exists, is not converted again")
        return
    paths = ["--input-fp8-hf-path", path_src, "--output-bf16-hf-path", path_dst]
    _run([sys.executable, "tools/fp8_cast_bf16.py", *paths], {})


def check_has_nvlink() -> bool:
    """Whether ``nvidia-smi`` tells of NVLink between GPUs."""
    if shutil.which("nvidia-smi") is None:
        return False
    command = ["nvidia-smi", "topo", "-m"]
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=_NVIDIA_SMI_S)
    return re.search(r"\bNV\d+\b", done.stdout) is not None


def save_to_temp_file(text: str, ext: str) -> str:
    """Writes a text to a new file whose name ends in ``.EXT``, and returns its path."""
    with tempfile.NamedTemporaryFile("w", suffix=f".{ext}", delete=False) as file:
        file.write(text)
    return file.name


def _run(command: list[str], env: Mapping[str, str]) -> None:
    print("$ " + shlex.join(command), flush=True)
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, **env})
