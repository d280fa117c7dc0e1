"""An environment of ``verifiers``, as its users write them: a tool, several turns, a rubric."""

import os
import time

import verifiers as vf
from datasets import Dataset


async def look(shelf: str) -> str:
    """Tells what lies on a shelf.

    Args:
        shelf: its letter.
    """
    print("this is no reply")
    return {"a": "37"}.get(shelf, "nothing")


async def right(completion, answer) -> float:
    """Whether the last thing said is the answer; some words are deeds."""
    said = str(completion[-1].content)
    if said == "raise":
        raise ZeroDivisionError("by zero")
    if said == "exit":
        os._exit(3)
    while said == "loop":
        time.sleep(0.01)
    return float(said == answer)


async def on_a(info) -> float:
    """Whether the row is about shelf a, whatever was said."""
    return float(info["shelf"] == "a")


def load_environment(
    shelves: str = "ab", broken: bool = False, on_a_is_worth: float | None = None
) -> vf.Environment:
    if broken:
        raise ValueError("no shelf")
    rows = [
        {"question": f"What is on {shelf}?", "answer": "37", "info": {"shelf": shelf}} for shelf in shelves
    ]
    funcs, weights = ([right], [2.0]) if on_a_is_worth is None else ([right, on_a], [2.0, on_a_is_worth])
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        system_prompt="Look.",
        tools=[look],
        max_turns=3,
        rubric=vf.Rubric(funcs=funcs, weights=weights),
    )
