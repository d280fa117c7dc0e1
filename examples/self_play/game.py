"""``--custom-generate-function-path examples.self_play.game.play``: two players, one of them an older self.

task     |           (who begins is in the label)
begins   kw3xq       sees what was said so far
answers  k__aq
begins   aaxqz
answers  f1kwq       whose turns have more lowercase letters in all has won

A win is worth 1, a draw 0.5. The model plays against ``past``, in an evaluation against ``first``.
"""

import copy
from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample

PAST, FIRST = "past", "first"
BEGINS, ANSWERS = "begins", "answers"
TURNS = 2  # of each player


async def play(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One game: the turns of both players; in an evaluation the model's last one alone."""
    other = FIRST if evaluation else PAST
    players = (None, other) if sample.label == BEGINS else (other, None)
    turns: list[Sample] = []
    for player in players * TURNS:
        turns.append(await _turn(args, player, sample, turns, sampling_params))
        if GenerateState(args).aborted or turns[-1].status is Sample.Status.ABORTED:
            sample.status = Sample.Status.ABORTED
            return sample
    worth = outcome(turns)
    for turn in turns:
        turn.reward = worth if turn.policy is None else 1 - worth
    return [turn for turn in turns if turn.policy is None][-1] if evaluation else turns


async def _turn(
    args: Namespace, player: str | None, task: Sample, before: list[Sample], sampling_params: dict[str, Any]
) -> Sample:
    """What a player says to all that was said; None is the model. All turns of a game are one execution."""
    turn = copy.deepcopy(task)
    turn.policy, turn.rollout_id = player, task.index
    turn.prompt = "|".join([str(task.prompt), *(said.response for said in before)])
    return await generate(args, turn, sampling_params)


def outcome(turns: list[Sample]) -> float:
    """What the game is worth to the model: 1 if it has won, 0.5 of a draw, else 0."""
    mine = sum(letters(turn.response) for turn in turns if turn.policy is None)
    theirs = sum(letters(turn.response) for turn in turns if turn.policy is not None)
    return 0.5 if mine == theirs else float(mine > theirs)


def letters(text: str) -> int:
    return sum(map(str.islower, text))
