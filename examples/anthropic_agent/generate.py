"""``--custom-generate-function-path examples.anthropic_agent.generate.generate``: trains what an agent asked.

As `examples.openai_agent.generate`, but for the adapter that the agent finds at its address.
"""

from argparse import Namespace
from typing import Any

from examples.anthropic_agent.agent import NoAnswer, solve
from examples.openai_agent import generate as openai_agent
from slime.agent.adapters import AnthropicAdapter
from slime.utils.types import Sample


class Provider(openai_agent.Provider):
    """The adapter of this process, and the address at which agents find it."""

    adapter_class = AnthropicAdapter


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Lets an agent work on a sample, whose prompt is a list of messages."""

    async def answer(base_url: str, api_key: str) -> str:
        try:
            return await solve(base_url, api_key, sample.prompt)
        except NoAnswer as error:
            sample.metadata["no_answer"] = str(error)
            return ""

    return await openai_agent.trained(args, Provider(args), sample, sampling_params, answer)
