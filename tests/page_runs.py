"""Which commands of pages are run, which come up to the start of a run, and which are left, and why."""

from tests.page_commands import NOT_HERE, SHELL, Command

RUN = (
    *("slime new-task", "slime check", "slime report", "slime diff", "slime completion", "slime doctor"),
    *("python tools/make_tiny_model.py", "python examples/calculator_tool/make_data.py"),
    *("python tools/convert_hf_to_fp8.py", "python tools/convert_hf_to_int4.py"),
    *("python tools/convert_hf_to_mxfp4.py", "python tools/fp8_cast_bf16.py"),
    "python -m slime.backends.megatron_utils.server",
)
"""Beginnings of commands that `tests.test_page_runs` runs as they are printed."""
CHECKED = ("slime train", "python train.py", "python train_async.py")
"""Beginnings of runs, which it takes through all checks before a start; tests/e2e has the runs themselves."""

_LAUNCHERS = {
    "bash scripts/run-": "GPUs and a model; tests/scripts/test_launchers.py runs it without train.py",
    "bash scripts/run-qwen3-4B.sh --check": "tests/check/test_scripts.py runs it for every launcher",
    "bash examples/": "tests/examples/test_run_scripts.py and tests/e2e/test_examples.py run them",
    "bash run.sh": "a minute of training each; tests/e2e/test_new_task.py trains every form",
    "bash scripts/quickstart.sh": "installs, and trains for minutes; tests/e2e/test_quickstart.py, nightly",
    "bash scripts/learning.sh": "hours; tests/e2e/test_learning.py runs a short one, nightly",
    "bash scripts/ray-cluster.sh": "ssh; tests/scripts/test_ray_cluster.py runs it with programs for ssh",
    "torchrun": "eight ranks; tests/backends/megatron_utils/test_server.py starts two",
}
_COMMANDS = {
    "slime chat": "talks; tests/cli/test_chat.py and tests/cli/test_chat_terminal.py talk to it",
    "slime resume": "trains; tests/cli/test_run_dirs.py runs it up to the loop",
    "python -m slime.cli": "tests/cli/test_main.py runs it",
    "python -m slime.weight_sync.versions.puller": "tests/weight_sync/test_delta.py starts it",
    "python -m slime_plugins.rollout_buffer.buffer": "tests/slime_plugins/test_rollout_buffer.py starts it",
    "python tools/convert_hf_to_torch_dist.py": "tests/tools/test_convert.py runs it, with ranks of its own",
    "python tools/convert_torch_dist_to_hf.py": "tests/tools/test_convert.py runs it, with ranks of its own",
    "python tools/convert_fsdp_to_hf.py": "tests/tools/test_convert_fsdp_to_hf.py runs it, after two ranks",
}
_DEVELOPERS = {
    "bash scripts/test.sh": "starts tests",
    "bash scripts/gpu.sh": "a GPU",
    "bash scripts/test-sglang.sh": "installs SGLang; starts tests/sglang_cpu",
    "bash scripts/test-original.sh": "the original; tests/original/test_stand_in.py tries it on a stand-in",
    "bash scripts/conformance.sh": "starts tests/backends/sglang_utils/test_conformance.py",
    "bash -n": "tests/scripts/test_launchers.py runs it for every script",
    "python tools/generate_flag_docs.py": "tests/test_flag_docs.py makes the page that it writes",
    "python tools/generate_metric_docs.py": "tests/observability/test_metric_table.py makes the page",
    "python -m tests.arguments.launch_table": "tests/arguments/test_launch_scripts.py makes the page",
    "python tools/release_check.py": "an environment with a wheel; tests/test_packaging.py does its parts",
    "python tools/uv_lock.py": "asks a package index; tests/test_packaging.py reads what it wrote",
    "python -m tests.golden.runs": "whole runs of two checkouts",
    "python -m tests.backends.embedded_engine.tool_calls.record": "SGLang",
}
_BENCHMARKS = {
    "python benchmarks/": "minutes each; tests/benchmarks/test_scripts.py runs them at their smallest",
    "python benchmarks/suite_times.py": "runs the suite",
    "python benchmarks/compare.py": "reads the last commit; tests/benchmarks/test_compare.py has its parts",
    "python benchmarks/mutation.py": "hours; tests/benchmarks/test_mutation.py has its parts",
    "python benchmarks/sampled_mutants.py": "hours; tests/benchmarks/test_mutation.py has its parts",
    "python benchmarks/planted_faults.py": "hours; tests/benchmarks/test_planted_faults.py has its parts",
    "python benchmarks/fully_async.py": "many clusters; tests/e2e/test_rollout_functions.py has such a run",
    "python benchmarks/sglang_runs.py": "SGLang; tests/benchmarks/test_sglang_runs.py reads what it wrote",
}
LEFT = {" ".join(words): why for words, why in NOT_HERE.items()}
LEFT |= _LAUNCHERS | _COMMANDS | _DEVELOPERS | _BENCHMARKS
"""Beginnings of commands that are left: what they need or take, and what runs them; the longest counts."""
NAMES = {
    *(f"slime {name}" for name in ("check", "diff", "new-task", "report", "resume", "train")),
    *("slime train --async", "slime check --write-config", "python tools/convert_hf_to_fp8.py"),
}
"""What stands in text for the name of a command."""


def reason(command: Command) -> str | None:
    """Why a command is not run here; None for one that is, or that nobody has thought of."""
    found = [beginning for beginning in LEFT if begins(command, beginning)]
    return LEFT[max(found, key=len)] if found else None


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
    left = is_name(command) or reason(command) is not None
    return not left and any(begins(command, beginning) for beginning in beginnings)
