"""The directory of a task: ``task.toml``, ``instruction.md``, files of environment, tests and solution."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.agent.sandbox import ContainerLimits
from slime.agent.sandbox.limits import MIB

CONFIG = "task.toml"
METADATA = "harbor"
"""The key of a row's metadata with the task's directory."""
WORKDIR = "/app"
_AGENT_S, _VERIFIER_S, _BUILD_S = 1800.0, 600.0, 600.0
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NETWORKS = ("public", "no-network")


class TaskError(ValueError):
    """A directory is no task, or one that needs what is not there."""


@dataclass(frozen=True)
class HarborTask:
    """A task, as its files say.

    Attributes:
        image: to be pulled; None where ``environment/Dockerfile`` has to be built.
        workdir: where the agent works; None for that of the image, or ``WORKDIR`` if it has none.
        needs_network, verifier_needs_network: of the agent's sandbox, and of the one that grades.
        agent_user, verifier_user: as whom they run.
    """

    folder: Path
    instruction: str
    image: str | None
    workdir: str | None
    limits: ContainerLimits
    needs_network: bool
    verifier_needs_network: bool
    agent_s: float
    verifier_s: float
    build_s: float
    agent_user: str
    verifier_user: str
    env: Mapping[str, str] = field(repr=False)
    verifier_env: Mapping[str, str] = field(repr=False)
    solution_env: Mapping[str, str] = field(repr=False)

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"


def find_tasks(folder: Path) -> list[Path]:
    """Returns the directories of tasks below a folder, by name; the folder itself if it is one.

    Raises:
        TaskError: there is none.
    """
    if (folder / CONFIG).is_file():
        return [folder]
    found = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
    if not found:
        raise TaskError(f"{folder}: no directory in it has a {CONFIG}")
    return found


def load_task(folder: Path) -> HarborTask:
    """Reads a task.

    Raises:
        TaskError: something is missing, wrong, or not supported; the message names it.
    """
    folder = folder.absolute()
    try:
        config = tomllib.loads(_text(folder / CONFIG))
        _refuse_unsupported(folder, config)
        return _task(folder, config)
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise TaskError(f"task {folder}: {error}") from error


def _text(file: Path) -> str:
    if not file.is_file():
        raise TaskError(f"no {file.name}")
    return file.read_text()


def _task(folder: Path, config: Mapping[str, Any]) -> HarborTask:
    environment, agent, verifier = (_table(config, name) for name in ("environment", "agent", "verifier"))
    instruction = without_canary(_text(folder / "instruction.md"))
    if not instruction.strip():
        raise TaskError("instruction.md is empty")
    _text(folder / "tests" / "test.sh")
    image = environment.get("docker_image")
    if image is None and not (folder / "environment" / "Dockerfile").is_file():
        raise TaskError("neither environment/Dockerfile nor docker_image of [environment]")
    network = _network(environment, None)
    return HarborTask(
        folder=folder,
        instruction=instruction,
        image=image,
        workdir=environment.get("workdir"),
        limits=_limits(environment),
        needs_network=_network(agent, network) == "public",
        verifier_needs_network=_network(verifier, network) == "public",
        agent_s=_seconds(agent, "timeout_sec", _AGENT_S),
        verifier_s=_seconds(verifier, "timeout_sec", _VERIFIER_S),
        build_s=_seconds(environment, "build_timeout_sec", _BUILD_S),
        agent_user=str(agent.get("user", "root")),
        verifier_user=str(verifier.get("user", "root")),
        env=_env(environment),
        verifier_env=_env(verifier),
        solution_env=_env(_table(config, "solution")),
    )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise TaskError(f"{name} is no table")
    return found


def _refuse_unsupported(folder: Path, config: Mapping[str, Any]) -> None:
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    separate = verifier.get("environment_mode") == "separate" and (folder / "tests/Dockerfile").exists()
    unsupported = {
        "[[steps]]": config.get("steps") or (folder / "steps").exists(),
        "Windows": str(environment.get("os", "linux")).lower() == "windows",
        "docker-compose": any((folder / "environment" / name).exists() for name in _COMPOSE),
        "GPUs": environment.get("gpus") or environment.get("gpu_types"),
        "TPUs": environment.get("tpu"),
        "MCP servers": environment.get("mcp_servers"),
        "healthcheck": environment.get("healthcheck"),
        "skills_dir": environment.get("skills_dir"),
        "[verifier.environment]": verifier.get("environment") or separate,
        "[[verifier.collect]]": verifier.get("collect"),
        "trajectory.json": (folder / "trajectory.json").exists(),
    }
    if found := [name for name, is_there in unsupported.items() if is_there]:
        raise TaskError(f"{', '.join(found)}: not supported")


def _network(table: Mapping[str, Any], default: str | None) -> str:
    """Returns the mode that a table names, by the older ``allow_internet`` too, or else this one."""
    older = {True: "public", False: "no-network"}.get(table.get("allow_internet"))  # type: ignore[arg-type]
    mode = str(table.get("network_mode") or older or default or "public")
    if mode not in _NETWORKS:
        raise TaskError(f"network_mode {mode}: not supported (wanted: {' or '.join(_NETWORKS)})")
    return mode


def _seconds(table: Mapping[str, Any], name: str, default: float) -> float:
    seconds = float(table.get(name, default))
    if not 0 < seconds < float("inf"):
        raise TaskError(f"{name} {seconds} (wanted: above 0)")
    return seconds


def _limits(environment: Mapping[str, Any]) -> ContainerLimits:
    usual = ContainerLimits()
    memory = environment.get("memory_mb", environment.get("memory"))
    size = usual.memory_bytes if memory is None else _bytes(memory)
    return ContainerLimits(memory_bytes=size, cpus=float(environment.get("cpus", usual.cpus)))


def _bytes(size: Any) -> int:
    """A number of MiB, or a text such as 2G."""
    if not isinstance(size, str):
        return int(size * MIB)
    if size[-1:].upper() not in _UNITS:
        raise TaskError(f"memory {size!r} (wanted: such as 512M or 2G)")
    return int(float(size[:-1]) * _UNITS[size[-1].upper()])


def _env(table: Mapping[str, Any]) -> dict[str, str]:
    """Values as they stand: none of this process's environment, which may hold keys, goes to a task."""
    found = {name: str(value) for name, value in _table(table, "env").items()}
    if asking := [name for name, value in found.items() if "${" in value]:
        raise TaskError(f"env {', '.join(asking)}: values of the host's environment are not supported")
    return found


def without_canary(text: str) -> str:
    """An instruction without the lines that mark a benchmark's data at its start, and blank ones there."""
    lines = text.split("\n")
    at = 0
    while at < len(lines) and _CANARY.fullmatch(lines[at].strip()):
        at += 1
    while at < len(lines) and not lines[at].strip():
        at += 1
    return "\n".join(lines[at:])


def row_of(task: HarborTask) -> dict[str, Any]:
    """Returns the row of the task for ``--prompt-data`` and ``--eval-prompt-data``."""
    return {
        "prompt": [{"role": "user", "content": task.instruction}],
        "metadata": {METADATA: str(task.folder)},
    }
