"""Which commands of pages are run where: by one test, or by others that take them from the pages."""

from functools import cache

from tests.page_commands import PAGES, SHELL, Command, commands_of

RUN = (
    *("slime new-task", "slime check", "slime report", "slime diff", "slime completion", "slime doctor"),
    *("python tools/make_tiny_model.py", "python examples/calculator_tool/make_data.py"),
    *("python tools/convert_hf_to_fp8.py", "python tools/convert_hf_to_int4.py"),
    *("python tools/convert_hf_to_mxfp4.py", "python tools/convert_hf_to_mxfp8.py"),
    "python tools/fp8_cast_bf16.py",
    *("python -m slime.backends.megatron_utils.server", "python -m slime.cli"),
)
"""Beginnings of commands that `tests.test_page_runs` runs as they are printed."""
CHECKED = ("slime train", "python train.py", "python train_async.py")
"""Beginnings of runs, which it takes through all checks before a start; tests/e2e has the runs themselves."""

_SCRIPTS, _PROGRAMS = "tests/scripts/test_page_scripts.py", "tests/test_page_programs.py"
_STAND_INS, _BENCHMARKS = "tests/test_page_stand_ins.py", "tests/benchmarks/test_page_benchmarks.py"
PRINTED = {
    "bash scripts/run-": "tests/scripts/test_launchers.py",
    "bash examples/": "tests/examples/test_run_scripts.py",
    "bash scripts/ray-cluster.sh": "tests/scripts/test_ray_cluster.py",
    "sbatch": "tests/scripts/test_cluster_files.py",
    **dict.fromkeys(("bash scripts/test.sh", "bash scripts/conformance.sh", "bash scripts/gpu.sh"), _SCRIPTS),
    **dict.fromkeys(("bash scripts/quickstart.sh", "bash scripts/learning.sh"), _SCRIPTS),
    "slime chat": "tests/cli/test_chat.py",
    "slime chaos": "tests/cli/test_chaos.py",
    "slime engines": "tests/ray/test_engine_control.py",
    "slime weights": "tests/cli/test_weights.py",
    "slime dashboard": "tests/cli/test_dashboard.py",
    "slime resume": "tests/cli/test_run_dirs.py",
    "python -m slime_plugins.rollout_buffer.buffer": "tests/slime_plugins/test_rollout_buffer.py",
    "python -m slime_plugins.training_service": "tests/e2e/test_training_service.py",
    "python -m slime.agent.harbor": "tests/agent/test_harbor_tasks.py",
    "python -m slime.environments.verifiers_host": "tests/rollout/test_verifiers_episodes.py",
    "python tools/convert_hf_to_torch_dist.py": "tests/tools/test_convert.py",
    "python tools/convert_torch_dist_to_hf.py": "tests/tools/test_convert.py",
    "python tools/convert_fsdp_to_hf.py": "tests/tools/test_convert_fsdp_to_hf.py",
    **dict.fromkeys(("ray get-auth-token", "ray start"), "tests/ray/test_cluster.py"),
    "git tag": "tests/test_packaging.py",
    **dict.fromkeys(
        ("pip install pytest", "pip install openai>=3,<4", "pip install --no-deps xgrammar"), _PROGRAMS
    ),
    **dict.fromkeys(
        ("pip install .", "python -m venv", "hf download"), _PROGRAMS
    ),  # not what else is installed
    "python -m pytest -p tests.plugins.delays": _PROGRAMS,
    "python tools/generate_flag_docs.py": "tests/test_flag_docs.py",
    "python tools/generate_metric_docs.py": "tests/observability/test_metric_table.py",
    "torchrun": "tests/backends/megatron_utils/test_server.py",
    **dict.fromkeys(("bash scripts/test-sglang.sh", "bash scripts/test-original.sh"), _SCRIPTS),
    **{
        f"python benchmarks/{name}.py": "tests/benchmarks/test_scripts.py"
        for name in (
            *("engine_throughput", "trainer_packing", "weight_sync", "gpu_trainer", "rollout_buffer"),
            "sandbox_pool",
        )
    },
    "python benchmarks/nightly.py": "tests/benchmarks/test_nightly.py",
    "bash scripts/audit.sh": "tests/scripts/test_audit.py",
    "python -m tests.golden.curves": "tests/golden/test_curves.py",
    "python -m tests.golden.runs --compare": "tests/golden/test_runs.py",
    **dict.fromkeys(("docker build", "docker run", "kubectl", "sky", "jupyter"), _STAND_INS),
    **dict.fromkeys(("pip install -e", "pip install -c constraints/cpu.txt", "pip install e2b"), _STAND_INS),
    "python -m sglang.launch_server": _STAND_INS,
    **{f"python benchmarks/{name}.py": _BENCHMARKS for name in ("compare", "suite_times", "sglang_runs")},
}
"""Beginnings of commands that these tests take from the pages: with other places and names, or with programs
that stand for what is not here (train.py of a large model, ssh, SLURM, the tests that would be started)."""
AT_NIGHT = {
    "bash run.sh": "tests/e2e/test_new_task.py",
    "python -m tests.arguments.launch_table": "tests/arguments/test_launch_scripts.py",
    "python -m pytest test_task.py": "tests/e2e/test_new_task.py",
    "python -m pytest tests/plugin_contracts": "tests/test_page_commands.py",
    "python -m pytest tests/plugin_contracts/test_signatures.py": "tests/test_page_commands.py",
    **{
        f"python benchmarks/{name}.py": "tests/benchmarks/test_scripts.py"
        for name in (
            "grpo_step",
            "observing",
            "open_dashboard",
            "startup",
            "in_flight",
            "random_syncs",
            "simulate",
            "gpu_loop",
            "chaos",
            "sync_model",
            "sync_memory",
            "shard_sync",
            "delta_ranks",
        )
    },
    **{
        f"python benchmarks/{name}.py": "tests/benchmarks/test_scripts.py"
        for name in ("against_trl", "fully_async", "killed_engines", "recovery", "soak")
    },
    **{
        f"python benchmarks/{name}.py": _BENCHMARKS
        for name in ("mutation", "sampled_mutants", "planted_faults")
    },
    "python -m tests.golden.runs": "tests/golden/test_runs.py",
    "python tools/release_check.py": "tests/test_packaging.py",
    "python tools/uv_lock.py": "tests/test_packaging.py",
}
"""The same, in tests that are nightly."""
NAMES = {
    *(f"slime {name}" for name in ("chaos", "check", "diff", "new-task", "report", "resume", "train")),
    *("slime train --async", "slime train --supervise", "slime check --write-config"),
    "python tools/convert_hf_to_fp8.py",
    *("python tools/convert_fsdp_to_hf.py", "python -m slime.weight_sync.versions.puller", "pip install"),
    "pip install --no-deps",
    "python -m slime.agent.harbor tasks --oracle",
    *("ray start", "ray start --node-ip-address", "ray start --num-gpus 1", "ray stop"),
    *("bash -n", "docker run --shm-size 8g"),
}
"""What stands in text for the name of a command."""


@cache
def every_command() -> tuple[Command, ...]:
    """Returns the commands of all pages, each once."""
    return tuple({command.words: command for page in PAGES for command in commands_of(page)}.values())


def printed(beginning: str) -> list[Command]:
    """Returns those that begin so, but for names."""
    return [c for c in every_command() if begins(c, beginning) and not is_name(c)]


def is_printed(command: Command) -> bool:
    """Whether a test elsewhere takes it from its page."""
    return not is_name(command) and any(begins(command, beginning) for beginning in PRINTED | AT_NIGHT)


def begins(command: Command, beginning: str) -> bool:
    """Whether a command has these words first; a word that ends with - or / stands for all that begin so."""
    text = " ".join(command.words)
    whole = beginning if beginning.endswith(("-", "/")) else f"{beginning} "
    return f"{text} ".startswith(whole)


def is_name(command: Command) -> bool:
    """Whether it is no command that can be run by itself: a name in the text, or a word of the shell."""
    return " ".join(command.words) in NAMES or command.words[0] in SHELL


def is_run(command: Command) -> bool:
    return _is_here(command, RUN)


def is_checked(command: Command) -> bool:
    return _is_here(command, CHECKED)


def _is_here(command: Command, beginnings: tuple[str, ...]) -> bool:
    elsewhere = is_name(command) or is_printed(command)
    return not elsewhere and any(begins(command, beginning) for beginning in beginnings)
