"""The agent, as others write them: it asks by OpenAI's client, and knows nothing of slime or of training.

user       k
assistant  look(shelf="k")
tool       37
assistant  \\boxed{37}
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import openai

MAX_TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Tells the number that lies on a shelf.",
        "parameters": {
            "type": "object",
            "properties": {"shelf": {"type": "string", "description": "its letter"}},
            "required": ["shelf"],
        },
    },
}


class NoAnswer(RuntimeError):
    """The model was asked as often as allowed, or its server refused."""


async def solve(
    base_url: str, api_key: str, messages: Sequence[Mapping[str, Any]], shelves: Mapping[str, str]
) -> str:
    """What the model says at last, after it has called the tool as often as it liked.

    Raises:
        NoAnswer: it never came to an end.
    """
    client = _client(base_url).with_options(api_key=api_key)
    conversation: list[Any] = list(messages)
    for _ in range(MAX_TURNS):
        try:
            answer = await client.chat.completions.create(model="any", messages=conversation, tools=[TOOL])
        except openai.OpenAIError as error:
            raise NoAnswer(str(error)) from error
        message = answer.choices[0].message
        conversation.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = look(call.function.arguments, shelves)
            conversation.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise NoAnswer(f"no answer in {MAX_TURNS} turns")


@cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """One for all conversations: each of its own would take longer to make than to use."""
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="-", max_retries=0, timeout=600, http_client=http_client
    )


def look(arguments: str, shelves: Mapping[str, str]) -> str:
    """The tool: what lies on the shelf that the model named in its JSON, which is read, never evaluated."""
    shelf = json.loads(arguments).get("shelf")
    return shelves.get(shelf, "nothing") if isinstance(shelf, str) else "error: no shelf"
