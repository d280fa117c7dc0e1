"""``--custom-generate-function-path examples.simulated_user.desk.generate``: a call of a customer.

user       Hello, I want to cancel the lamp that I ordered.       (said by the second model)
assistant  What is your name?
user       Ada.
assistant  <tool_call>{"name": "orders_of", "arguments": {"name": "Ada"}}</tool_call>
tool       {"17": "lamp", "18": "desk"}
assistant  <tool_call>{"name": "cancel", "arguments": {"order": "17"}}</tool_call>
tool       cancelled
assistant  It is cancelled.
user       ###STOP###                                              (the orders are compared)
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.environments import Answer, Call, Step
from slime.rollout.episodes import Episodes
from slime.rollout.generation import get_model_url
from slime.utils.http_utils import post

STOP = "###STOP###"
RULES = (
    "You serve customers of a shop. Look orders up by `orders_of`, and cancel what the customer asks for by "
    "`cancel`: nothing else, and nothing of somebody else's."
)
CUSTOMER = (
    "You are {name}, a customer on the phone. Your wish: {wish} Say one short sentence at a time. Once your "
    f"wish is fulfilled or refused, say {STOP} and nothing else."
)
GREETING = "Hello, how can I help you?"


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


class Desk:
    """An episode is a call of one customer; it earns 1 if in the end exactly the right orders are left."""

    tools = (
        _tool("orders_of", "The orders of a customer, by their numbers.", "name"),
        _tool("cancel", "Cancels an order.", "order"),
    )

    def __init__(self, args: Namespace) -> None:
        self._user_url = get_model_url(args, "user", "/v1/chat/completions")

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """The customer of a row says what he wants."""
        row = task["metadata"]
        self._orders: dict[str, dict[str, str]] = {name: dict(owned) for name, owned in row["orders"].items()}
        self._left, self._seed = row["left"], seed
        told = CUSTOMER.format(name=row["name"], wish=row["wish"])
        self._heard = [{"role": "system", "content": told}]
        return [
            {"role": "system", "content": RULES},
            {"role": "user", "content": await self._customer(GREETING)},
        ]

    async def step(self, answer: Answer) -> Step:
        """The results of calls, or what the customer says to an answer without any."""
        if answer.calls:
            return Step([self._result_of(call) for call in answer.calls])
        said = await self._customer(answer.text)
        if STOP in said:
            return Step(reward=float(self._orders == self._left), done=True)
        return Step(said)

    def _result_of(self, call: Call) -> dict[str, str]:
        """The message that tells the model what a call came to."""
        given = next(iter(call.arguments.values()), None)
        result = json.dumps(self._orders.get(given, {})) if call.name == "orders_of" else self._cancel(given)
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def _cancel(self, order: Any) -> str:
        for owned in self._orders.values():
            if isinstance(order, str) and owned.pop(order, None):
                return "cancelled"
        return "error: no such order"

    async def _customer(self, heard: str) -> str:
        """What the second model says, which takes the desk for its user."""
        self._heard.append({"role": "user", "content": heard})
        asked = {"model": "user", "messages": self._heard, "max_tokens": 64, "seed": self._seed}
        answer = await post(self._user_url, asked)
        said: str = answer["choices"][0]["message"]["content"] or ""
        self._heard.append({"role": "assistant", "content": said})
        return said


generate = Episodes(Desk, max_turns=12, limit_s=120)
