"""``--custom-generate-function-path examples.two_policies.game.play``: a game of two policies.

task       a                    (lowercase letters are wanted; 1 stands for digits)
writer     kw3xq                sees the task
editor     kwaxq                sees what the writer wrote, and nothing else

The editor earns the share of its characters that are of the kind that the task wants. The writer earns the
mean of its own share and the editor's: it has to say what is wanted so that the editor can tell.
"""

import copy
from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample

WRITER, EDITOR = "writer", "editor"


async def play(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One game: a sample of the writer and one of the editor; in an evaluation the editor's alone."""
    writer = await _says(args, WRITER, sample, sampling_params)
    editor = await _says(args, EDITOR, sample, sampling_params, writer.response)
    if GenerateState(args).aborted or Sample.Status.ABORTED in (writer.status, editor.status):
        sample.status = Sample.Status.ABORTED
        return sample
    kind = str(sample.label)
    editor.reward = share(editor.response, kind)
    writer.reward = (share(writer.response, kind) + editor.reward) / 2
    return editor if evaluation else [writer, editor]


async def _says(
    args: Namespace, policy: str, task: Sample, sampling_params: dict[str, Any], heard: str | None = None
) -> Sample:
    """What a policy says to the task, or to what it has heard; both samples of a game are one execution."""
    sample = copy.deepcopy(task)
    sample.policy, sample.rollout_id = policy, task.index
    sample.prompt = sample.prompt if heard is None else heard or " "
    return await generate(args, sample, sampling_params)


def share(text: str, kind: str) -> float:
    """The share of a text's characters that are of a kind."""
    fits = {"letter": str.islower, "digit": str.isdigit}[kind]
    return sum(map(fits, text)) / max(len(text), 1)
