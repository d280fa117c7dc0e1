"""``--custom-generate-function-path examples.anthropic_agent.generate.generate``: trains what an agent asked.

The agent gets an address and a key, as from any provider. Behind the address is an `AnthropicAdapter`, which
asks the run's engines and keeps the tokens; the key says which sample it works on.
"""

import uuid
from argparse import Namespace
from typing import Any

from examples.anthropic_agent.agent import NoAnswer, solve
from examples.openai_agent.generate import grade
from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample


class Provider(metaclass=SingletonMeta):
    """The adapter of this process, and the address at which agents find it."""

    def __init__(self, args: Namespace) -> None:
        tokenizer = GenerateState(args).tokenizer
        self.adapter = AnthropicAdapter(
            tokenizer=tokenizer, sglang_url=get_model_url(args), tool_parser="hermes"
        )
        # A turn whose agent is gone ends, and is not recorded.
        self.server = run_app_in_thread(self.adapter.app, runner_kwargs={"handler_cancellation": True})


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Lets an agent work on a sample, whose prompt is a list of messages.

    ``max_new_tokens`` of ``sampling_params`` holds for a turn, ``--rollout-max-context-len`` for all of them.
    """
    provider, sid = Provider(args), uuid.uuid4().hex
    longest = args.rollout_max_context_len or 0
    provider.adapter.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=longest)
    try:
        answer = await _answer_of(provider, sid, sample)
        samples = await provider.adapter.finish_session(
            sid, base_sample=sample, reward=grade(answer, sample.label)
        )
    finally:  # an agent may fail in other ways, or be cancelled; nobody would ask for its turns
        provider.adapter.drop_session(sid)
    if not samples:  # not one turn: there is nothing to learn from
        sample.status = Sample.Status.ABORTED
        return sample
    return samples if len(samples) > 1 else samples[0]


async def _answer_of(provider: Provider, sid: str, sample: Sample) -> str:
    try:
        return await solve(provider.server.url, sid, sample.prompt)
    except NoAnswer as error:
        sample.metadata["no_answer"] = str(error)
        return ""
