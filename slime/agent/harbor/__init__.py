"""Tasks in the format of Harbor: a container, an instruction, and tests that say what an answer is worth."""

from slime.agent.harbor.grading import VerifierError, grade, open_sandbox, run_solution, workdir_of
from slime.agent.harbor.rewards import reward_of
from slime.agent.harbor.task import HarborTask, TaskError, find_tasks, load_task, row_of

__all__ = [
    "HarborTask",
    "TaskError",
    "VerifierError",
    "find_tasks",
    "grade",
    "load_task",
    "open_sandbox",
    "reward_of",
    "row_of",
    "run_solution",
    "workdir_of",
]
