"""Tasks in the format of Harbor, for tests: a number is to be written to a file."""

from pathlib import Path

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 120.0
[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
"""
INSTRUCTION = """<!-- BENCHMARK DATA: canary GUID 1234 -->
# harbor-canary 1234

Write 42 to the file answer in the working directory.
"""
TESTS = """#!/bin/sh
mkdir -p /logs/verifier
[ "$(cat answer 2> /dev/null)" = "$(cat /tests/wanted)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


def make_task(
    folder: Path,
    *,
    toml: str = TOML,
    tests: str = TESTS,
    instruction: str = INSTRUCTION,
    dockerfile: str = "FROM scratch\nWORKDIR /app\nCOPY given given\n",
) -> Path:
    """Writes a task, and returns its directory."""
    files = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "environment/given": "here\n",
        "tests/test.sh": tests,
        "tests/wanted": "42\n",
        "solution/solve.sh": "#!/bin/sh\necho 42 > answer\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
