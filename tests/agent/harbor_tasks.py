"""Tasks in the format of Harbor, for tests: a number is to be written to a file."""

from pathlib import Path

from slime.agent.harness import CommandHarness

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

ASK = """
import json, os, subprocess, urllib.request
prompt = open(os.environ["SLIME_PROMPT_FILE"]).read()
asked = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
request = urllib.request.Request(
    os.environ["URL"] + "/v1/chat/completions",
    json.dumps(asked).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]},
)
with urllib.request.urlopen(request, timeout=300) as response:
    said = json.load(response)["choices"][0]["message"]["content"]
"""
"""The beginning of a program that is an agent: what the model says to its task."""
PYTHON = "/usr/bin/python3"
"""Runs it in a container of the stand-in, which shows the machine's programs."""
WITH_AGENT = "FROM scratch\nWORKDIR /app\nCOPY given given\nCOPY agent.py agent.py\n"


def make_task(
    folder: Path,
    *,
    toml: str = TOML,
    tests: str = TESTS,
    instruction: str = INSTRUCTION,
    dockerfile: str = "FROM scratch\nWORKDIR /app\nCOPY given given\n",
    wanted: str = "42",
    agent: str | None = None,
) -> Path:
    """Writes a task, and returns its directory.

    Args:
        agent: a program that goes on from ``ASK``, in the image as ``agent.py``.
    """
    files = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "environment/given": "here\n",
        "tests/test.sh": tests,
        "tests/wanted": f"{wanted}\n",
        "solution/solve.sh": f"#!/bin/sh\necho {wanted} > answer\n",
    }
    if agent is not None:
        files |= {"environment/Dockerfile": WITH_AGENT, "environment/agent.py": ASK + agent}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def agent_harness() -> CommandHarness:
    """Starts the ``agent`` of a task."""
    env = {"URL": "{adapter_url}", "KEY": "{session_id}"}
    return CommandHarness("writer", f"{PYTHON} /app/agent.py", env=env, user="root")
