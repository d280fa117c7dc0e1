"""An agent as others write them: it speaks OpenAI's API, and knows nothing of slime or of training."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from examples.calculator_tool.calculator import answer_call

MAX_TURNS = 6
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Adds, subtracts or multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 47*28"}},
            "required": ["expression"],
        },
    },
}


class NoAnswer(RuntimeError):
    """The model was asked as often as allowed, or its server refused."""


async def solve(base_url: str, api_key: str, messages: Sequence[dict[str, Any]]) -> str:
    """What the model says at last, after it has called the tool as often as it liked.

    Raises:
        NoAnswer: it never came to an end.
    """
    conversation = list(messages)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, trust_env=False) as client:
        for _ in range(MAX_TURNS):
            request = {"model": "default", "messages": conversation, "tools": [TOOL]}
            response = await client.post("/v1/chat/completions", json=request)
            if response.status_code != 200:
                raise NoAnswer(f"HTTP {response.status_code}: {response.text[:200]}")
            message = response.json()["choices"][0]["message"]
            conversation.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            conversation += [_run(call) for call in message["tool_calls"]]
    raise NoAnswer(f"no answer in {MAX_TURNS} turns")


def _run(call: dict[str, Any]) -> dict[str, Any]:
    """The message that tells the model what its call came to."""
    expression = json.loads(call["function"]["arguments"]).get("expression")
    result = answer_call(f"<tool_call>{expression}</tool_call>") or "error: not such an expression"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}
