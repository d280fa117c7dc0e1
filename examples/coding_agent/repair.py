"""``--custom-generate-function-path examples.coding_agent.repair.generate``: a shell, a bug, hidden cases.

user       `last` in solution.py is wrong. Wanted: the last item of a list; None of an empty one. ...
assistant  <tool_call>{"name": "shell", "arguments": {"command": "cat solution.py"}}</tool_call>
tool       def last(items): ...
assistant  <tool_call>{"name": "shell", "arguments": {"command": "sed -i ..."}}</tool_call>
tool       (exit code 0)
assistant  done
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from examples.coding_agent.grading import FILE, share_of_right_cases
from slime.agent.sandbox import Limits, LocalSandbox, SandboxError
from slime.environments import Answer, Step
from slime.rollout.base_types import RolloutError
from slime.rollout.episodes import Episodes

COMMAND_S, LONGEST_OUTPUT = 20, 4000
LIMITS = Limits(memory_bytes=1 << 30, processes=32, output_bytes=16 << 10)
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command in the directory of the code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class Repair:
    """An episode has a sandbox with the code, until a turn without a call; then the code is graded."""

    tools = (SHELL,)

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Lays the code of a row into a new sandbox."""
        self._bug = task["metadata"]
        self._sandbox = LocalSandbox(limits=LIMITS)
        try:
            await self._stack.enter_async_context(self._sandbox)
        except SandboxError as error:  # of this machine, whatever the row
            raise RolloutError(str(error)) from error
        await self._sandbox.write_file(FILE, self._bug["source"])
        return list(task["prompt"])

    async def step(self, answer: Answer) -> Step:
        """Runs a command, or grades what there is now."""
        if not answer.calls:
            return Step(reward=await self._score(), done=True)
        command = answer.calls[0].arguments.get("command")
        if not isinstance(command, str):
            return Step("error: no command")
        code, output = await self._sandbox.exec(command, timeout=COMMAND_S)
        return Step(f"{output[-LONGEST_OUTPUT:]}(exit code {code})")

    async def _score(self) -> float:
        code, _ = await self._sandbox.exec(f"test -f {FILE}", timeout=COMMAND_S)
        if code != 0:
            return 0.0
        source = await self._sandbox.read_file(FILE)
        return float(await share_of_right_cases(source, self._bug["function"], self._bug["cases"]) == 1.0)

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._stack.aclose()


generate = Episodes(Repair, max_turns=12, limit_s=120)
