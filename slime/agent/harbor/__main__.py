"""Rows of tasks for a run, and whether tasks hold what they promise.

    python -m slime.agent.harbor TASKS --rows tasks.jsonl
    python -m slime.agent.harbor TASKS --oracle --network bridge

TASKS is a directory of tasks, or one task. ``--oracle`` runs the solution of each, prints its rewards, and
ends with status 1 if one fails.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.agent.harbor.grading import (
    VerifierError,
    grade,
    open_sandbox,
    run_solution,
    workdir_of,
)
from slime.agent.harbor.task import HarborTask, TaskError, find_tasks, load_task, row_of
from slime.agent.sandbox import SandboxError


async def solved(task: HarborTask, network: str | None) -> bool:
    """Whether the solution earned a reward, which is printed."""
    try:
        async with open_sandbox(task, network) as sandbox:
            folder = await workdir_of(task, sandbox)
            code = await run_solution(task, sandbox, folder)
            rewards = await grade(task, sandbox, folder, network)
    except (SandboxError, TaskError, VerifierError) as error:
        print(f"{task.folder.name}: {error}")
        return False
    print(f"{task.folder.name}: {json.dumps(rewards)}, exit code {code} of the solution")
    return True


async def _all_solved(tasks: Sequence[HarborTask], network: str | None) -> bool:
    return all([await solved(task, network) for task in tasks])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime.agent.harbor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("tasks", type=Path, help="directory of tasks, or of one")
    parser.add_argument("--rows", type=Path, help="file to write: rows for --prompt-data")
    parser.add_argument("--oracle", action="store_true", help="run the tasks' own solutions")
    parser.add_argument("--network", help="the engine's, for tasks that want one")
    given = parser.parse_args(argv)
    try:
        tasks = [load_task(folder) for folder in find_tasks(given.tasks)]
    except TaskError as error:
        print(error, file=sys.stderr)
        return 1
    if given.rows:
        given.rows.parent.mkdir(parents=True, exist_ok=True)
        given.rows.write_text("".join(json.dumps(row_of(task)) + "\n" for task in tasks))
        print(f"{len(tasks)} rows in {given.rows}")
    return 0 if not given.oracle or asyncio.run(_all_solved(tasks, given.network)) else 1


if __name__ == "__main__":
    sys.exit(main())
