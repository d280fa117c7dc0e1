"""``--custom-generate-function-path examples.openai_agent.generate.generate``: trains what an agent asked.

The agent gets an address and a key, as from any provider. Behind the address is an `OpenAIAdapter`, which
asks the run's engines and keeps the tokens; the key says which sample it works on.
"""

import uuid
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from examples.openai_agent.agent import NoAnswer, solve
from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample


class Provider(metaclass=SingletonMeta):
    """The adapter of this process, and the address at which agents find it."""

    adapter_class: type[BaseAdapter] = OpenAIAdapter

    def __init__(self, args: Namespace) -> None:
        tokenizer = GenerateState(args).tokenizer
        self.adapter = self.adapter_class(
            tokenizer=tokenizer, sglang_url=get_model_url(args), tool_parser="hermes"
        )
        # A turn whose agent is gone ends, and is not recorded.
        self.server = run_app_in_thread(self.adapter.app, runner_kwargs={"handler_cancellation": True})


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Lets an agent work on a sample, whose prompt is a list of messages."""

    async def answer(base_url: str, api_key: str) -> str:
        try:
            return await solve(base_url, api_key, sample.prompt)
        except NoAnswer as error:
            sample.metadata["no_answer"] = str(error)
            return ""

    return await trained(args, Provider(args), sample, sampling_params, answer)


async def trained(
    args: Namespace,
    provider: Provider,
    sample: Sample,
    sampling_params: dict[str, Any],
    answer: Callable[[str, str], Awaitable[str]],
) -> Sample | list[Sample]:
    """Returns what an agent asked for, to be trained on.

    ``max_new_tokens`` of ``sampling_params`` holds for a turn, ``--rollout-max-context-len`` for all of them.

    Args:
        answer: lets the agent work, with the address and the key of its provider.
    """
    sid, longest = uuid.uuid4().hex, args.rollout_max_context_len or 0
    provider.adapter.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=longest)
    try:
        reward = grade(await answer(provider.server.url, sid), sample.label)
        samples = await provider.adapter.finish_session(sid, base_sample=sample, reward=reward)
    finally:  # an agent may fail in other ways, or be cancelled; nobody would ask for its turns
        provider.adapter.drop_session(sid)
    if not samples:  # not one turn: there is nothing to learn from
        sample.status = Sample.Status.ABORTED
        return sample
    return samples if len(samples) > 1 else samples[0]


def grade(answer: str, label: str) -> float:
    """1.0 if the last ``\\boxed{}`` is the label, letter by letter; else 0.0."""
    box = boxed_answer(answer)
    return float(box is not None and box.strip() == label.strip())
