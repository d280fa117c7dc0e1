"""A generate function: `generate_with_multi_agents` of ``--custom-generate-function-path``.

solver 1 ──┐            ┌── rewriter 1 ──┐
solver 2 ──┼─ all read ─┼── rewriter 2 ──┼── selector: "\\boxed{2}"
solver 3 ──┘            └── rewriter 3 ──┘

One sample becomes seven, all trained: an execution. The number of solvers is ``num_parallel`` (3) of
``--custom-config-path``. With ``--policies`` its ``role_policies`` says which policy plays which role.
"""

import asyncio
import copy
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from examples.multi_agent.prompts import rewriter_prompt, selector_prompt, solver_prompt
from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample


class Aborted(Exception):
    """The rollout has enough; what was said so far is of no use without the rest."""


@dataclass
class Team:
    """What all roles of one execution share.

    Attributes:
        origin: the sample whose problem is worked on.
        said: how many answers were asked for, which numbers their seeds.
    """

    args: Namespace
    origin: Sample
    params: dict[str, Any]
    said: int = 0

    async def ask(self, role: str, request: str) -> Sample:
        """A sample of its own for one answer, which belongs to the group and the execution of the origin."""
        state = GenerateState(self.args)
        sample = copy.deepcopy(self.origin)
        sample.prompt = state.tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
        )
        sample.rollout_id = self.origin.index
        sample.metadata["role"] = role
        sample.policy = getattr(self.args, "role_policies", {}).get(role, sample.policy)
        self.said += 1
        params = dict(self.params)
        if "sampling_seed" in params:  # the same for all would make equal questions have equal answers
            params["sampling_seed"] = params["sampling_seed"] * 1009 + self.said
        sample = await generate(self.args, sample, params)
        if state.aborted or sample.status == Sample.Status.ABORTED:
            raise Aborted
        return sample


async def generate_with_multi_agents(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """All samples of the roles with their rewards; in an evaluation the selected answer alone.

    A solver or a rewriter earns what ``--rm-type`` or ``--custom-rm-path`` gives its answer. The selector
    earns what the chosen answer earned, and nothing if it chose none.
    """
    team = Team(args, sample, sampling_params)
    problem = problem_of(sample)
    try:
        solvers = await _all(team, "solver", [solver_prompt(problem)])
        request = rewriter_prompt(problem, [solver.response for solver in solvers])
        rewriters = await _all(team, "rewriter", [request])
        selector = await team.ask("selector", selector_prompt(problem, [r.response for r in rewriters]))
    except Aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    candidates = [*solvers, *rewriters]
    for candidate, reward in zip(candidates, await batched_async_rm(args, candidates), strict=True):
        candidate.reward = reward
    chosen = selected(selector.response, rewriters)
    selector.reward = 0.0 if chosen is None else chosen.reward
    if evaluation:
        return chosen or rewriters[0]
    return [*candidates, selector]


async def _all(team: Team, role: str, requests: list[str]) -> list[Sample]:
    """``num_parallel`` answers to each request, all at a time; none is left running if one is aborted."""
    repeated = requests * getattr(team.args, "num_parallel", 3)
    results = await asyncio.gather(*(team.ask(role, r) for r in repeated), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Sample)]


def problem_of(sample: Sample) -> str:
    """The text of the problem, of a prompt with or without messages."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(sample.prompt[-1]["content"])


def selected(response: str, candidates: list[Sample]) -> Sample | None:
    """The candidate whose number the selector put into its last box; None if there is no such."""
    answer = (boxed_answer(response) or "").strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= len(candidates):
        return None
    return candidates[int(answer) - 1]
