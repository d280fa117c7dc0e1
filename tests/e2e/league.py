"""A game of two policies, each against what the other or itself was some rollouts ago."""

import copy
from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample

GAMES = (("a", "past-b"), ("b", "first-b"))
"""Who plays, and against whom."""
EVERYBODY = ("a", "b", "past-b", "first-b")


async def play(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Both games; what they are worth is as good as random.

    The metadata of all have what everybody makes of one text: log-probs of tokens tell weights apart.
    """
    greedy = {**sampling_params, "temperature": 0.0, "max_new_tokens": 4}
    probes = {name: await _says(args, name, sample, sample.prompt, greedy) for name in EVERYBODY}
    told = {name: [probe.tokens, probe.rollout_log_probs] for name, probe in probes.items()}
    turns = []
    for player, opponent in GAMES:
        other = await _says(args, opponent, sample, sample.prompt, sampling_params)
        mine = await _says(args, player, sample, f"{sample.prompt}|{other.response}", sampling_params)
        mine.reward = float(sum(mine.tokens) % 2)
        other.reward = 1 - mine.reward
        turns += [mine, other]
    for turn in turns:
        turn.metadata["probes"] = told
    return turns


async def _says(
    args: Namespace, policy: str, task: Sample, prompt: str, sampling_params: dict[str, Any]
) -> Sample:
    said = copy.deepcopy(task)
    said.policy, said.rollout_id, said.prompt = policy, task.index, prompt
    return await generate(args, said, sampling_params)
