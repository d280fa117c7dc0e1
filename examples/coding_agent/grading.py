"""Calls a repaired function in a sandbox that its author never wrote to.

Only the file comes with it, and only arguments: what they should give stays outside, so that code which reads
all there is, writes what it likes or exits early cannot know what would be right.
"""

import json
from collections.abc import Sequence
from typing import Any

from slime.agent.sandbox import LocalSandbox

FILE = "solution.py"
CALL_S = 20
_RUNNER = """
import json, sys
from solution import {function}
for arguments in json.load(open("arguments.json")):
    try:
        print(json.dumps({function}(*arguments)))
    except Exception as error:
        print(json.dumps({{"raised": type(error).__name__}}))
"""


async def share_of_right_cases(
    sandbox: LocalSandbox, source: str, function: str, cases: Sequence[Any]
) -> float:
    """How many of the cases, pairs of arguments and result, come out right: 0 to 1.

    Args:
        sandbox: in which nobody has worked.

    Raises:
        SandboxError: it fails, which says nothing of the code.
    """
    await sandbox.write_file(FILE, source)
    await sandbox.write_file("arguments.json", json.dumps([arguments for arguments, _ in cases]))
    await sandbox.write_file("runner.py", _RUNNER.format(function=function))
    _, output = await sandbox.exec("python runner.py 2>/dev/null", timeout=CALL_S)
    lines = output.splitlines()
    if len(lines) != len(cases):
        return 0.0
    return sum(line == json.dumps(wanted) for line, (_, wanted) in zip(lines, cases, strict=True)) / len(
        cases
    )
