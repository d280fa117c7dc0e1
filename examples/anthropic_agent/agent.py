"""An agent as others write them: it asks by Anthropic's client, and knows nothing of slime or of training."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import anthropic

from examples.calculator_tool.calculator import answer_call

MAX_TURNS = 6
TOOL: Any = {
    "name": "calculate",
    "description": "Adds, subtracts or multiplies two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 47*28"}},
        "required": ["expression"],
    },
}


class NoAnswer(RuntimeError):
    """The model was asked as often as allowed, or its server refused."""


async def solve(base_url: str, api_key: str, messages: Sequence[Any]) -> str:
    """What the model says at last, after it has called the tool as often as it liked.

    Raises:
        NoAnswer: it never came to an end.
    """
    client = _client(base_url).with_options(api_key=api_key)
    conversation = list(messages)
    for _ in range(MAX_TURNS):
        try:
            answer = await client.messages.create(
                model="default", max_tokens=1024, messages=conversation, tools=[TOOL]
            )
        except anthropic.AnthropicError as error:
            raise NoAnswer(str(error)) from error
        conversation.append({"role": "assistant", "content": answer.content})
        if not (calls := [block for block in answer.content if block.type == "tool_use"]):
            return "".join(block.text for block in answer.content if block.type == "text")
        conversation.append({"role": "user", "content": [_run(call) for call in calls]})
    raise NoAnswer(f"no answer in {MAX_TURNS} turns")


@cache
def _client(base_url: str) -> anthropic.AsyncAnthropic:
    """One for all conversations: each of its own would take longer to make than to use."""
    http_client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    return anthropic.AsyncAnthropic(
        base_url=base_url, api_key="-", max_retries=0, timeout=600, http_client=http_client
    )


def _run(call: Any) -> dict[str, Any]:
    """The block that tells the model what its call came to."""
    result = answer_call(f"<tool_call>{call.input.get('expression')}</tool_call>")
    text = result or "error: not such an expression"
    return {"type": "tool_result", "tool_use_id": call.id, "content": text, "is_error": result is None}
