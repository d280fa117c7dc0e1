"""``--custom-generate-function-path examples.coding_agent.repair.generate``: a shell, a bug, hidden cases.

user       `last` in solution.py is wrong. Wanted: the last item of a list; None of an empty one. ...
assistant  <tool_call>{"name": "shell", "arguments": {"command": "cat solution.py"}}</tool_call>
tool       def last(items): ...
assistant  <tool_call>{"name": "shell", "arguments": {"command": "sed -i ..."}}</tool_call>
tool       (exit code 0)
assistant  done
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from examples.coding_agent.grading import FILE, share_of_right_cases
from slime.agent.sandbox import Limits, LocalSandbox, Prepared, SandboxError, by_line
from slime.environments import Answer, Step
from slime.rollout.base_types import RolloutError
from slime.rollout.episodes import Episodes

COMMAND_S, LONGEST_OUTPUT = 20, 4000
LIMITS = Limits(memory_bytes=1 << 30, processes=32, output_bytes=64 << 10)
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
    """An episode has a sandbox with the code, until a turn without a call; then the code is graded.

    Args:
        prepare: a line of shell that makes the workspace, once in this process: both sandboxes of an episode
            start from what has come of it. By default it is empty.
        readable: paths of this machine that the line reads, such as a repository to clone.
    """

    tools = (SHELL,)

    def __init__(self, prepare: str = "true", readable: Sequence[str] = ()) -> None:
        self._stack, self._prepared = AsyncExitStack(), _prepared(prepare, tuple(readable))

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Lays the code of a row into a new sandbox."""
        self._bug = task["metadata"]
        try:
            self._sandbox = await self._prepared.start()
        except SandboxError as error:  # of this machine, whatever the row
            raise RolloutError(str(error)) from error
        self._stack.push_async_exit(self._sandbox)
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
        function, cases = self._bug["function"], self._bug["cases"]
        async with (await self._prepared.snapshot()).sandbox() as other:
            return float(await share_of_right_cases(other, source, function, cases) == 1.0)

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._stack.aclose()


@cache
def _prepared(line: str, readable: tuple[str, ...]) -> Prepared[LocalSandbox]:
    """For all episodes of this process."""
    return Prepared(lambda: LocalSandbox(limits=LIMITS, readable=readable), by_line(line))


generate = Episodes(Repair, max_turns=12, limit_s=120)
