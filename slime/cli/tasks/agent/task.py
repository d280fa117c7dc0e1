"""What a run calls: gives the agent an address and a key, waits for its answer, and grades it.

Behind the address is an ``OpenAIAdapter``: it asks the run's engines and keeps the tokens that they made. The
key says which sample a request belongs to. ``run.yaml`` names ``task.generate``.
"""

import re
import uuid
from argparse import Namespace
from typing import Any

from agent import NoAnswer, solve

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

TOOL_PARSER = "hermes"  # how the model writes calls: JSON in <tool_call> tags
_ANSWER = re.compile(r"\\boxed\{([0-9]+)\}")


class Provider(metaclass=SingletonMeta):
    """The adapter of this process, and the address at which agents find it."""

    def __init__(self, args: Namespace) -> None:
        self.adapter = OpenAIAdapter(
            tokenizer=GenerateState(args).tokenizer, sglang_url=get_model_url(args), tool_parser=TOOL_PARSER
        )
        # A turn whose agent is gone ends, and is not recorded.
        self.server = run_app_in_thread(self.adapter.app, runner_kwargs={"handler_cancellation": True})


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Lets the agent work on a sample, whose prompt is a list of messages."""
    provider, key = Provider(args), uuid.uuid4().hex
    provider.adapter.open_session(key, sampling_defaults=sampling_params)
    try:
        reward = score(await _answer_of(provider, key, sample), str(sample.label))
        samples = await provider.adapter.finish_session(key, base_sample=sample, reward=reward)
    finally:  # the agent may fail in other ways, or be cancelled
        provider.adapter.drop_session(key)
    if not samples:  # not one turn: there is nothing to learn from
        sample.status = Sample.Status.ABORTED
        return sample
    return samples if len(samples) > 1 else samples[0]


async def _answer_of(provider: Provider, key: str, sample: Sample) -> str:
    url, shelves = f"{provider.server.url}/v1", sample.metadata["shelves"]
    try:
        return await solve(url, key, sample.prompt, shelves)
    except NoAnswer as error:
        sample.metadata["no_answer"] = str(error)
        return ""


def score(answer: str, label: str) -> float:
    """The reward: 0.1 for an answer at all, the rest for the share of its digits that are right.

    Partial credit gives a group of answers something to differ in before any of them is right.
    """
    found = _ANSWER.search(answer)
    if found is None or len(found[1]) != len(label):
        return 0.0
    right = sum(one == other for one, other in zip(found[1], label, strict=True))
    return 0.1 + 0.9 * right / len(label)
