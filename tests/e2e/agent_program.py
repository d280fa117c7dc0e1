"""Agents that know an address and a key, and nothing of training or of what serves them.

Each line of the input is a conversation to have: ``{"url": ..., "key": ..., "turns": 6}``. Many are had at
once. Each line of the output says what happened: a turn was asked for, the first of its text came, it was
answered or refused, the conversation is over. Every other turn is streamed; none is asked for twice.
"""

import asyncio
import json
import sys
import time
from typing import Any

import openai


def tell(key: str, event: str, **more: Any) -> None:
    """Writes what happened."""
    print(json.dumps({"time": time.time(), "key": key, "event": event, **more}), flush=True)


async def answer(client: openai.AsyncOpenAI, key: str, turn: int, messages: list[Any]) -> str:
    """One turn, whole or as a stream."""
    if turn % 2:
        whole = await client.chat.completions.create(model="any", messages=messages)
        return whole.choices[0].message.content or ""
    parts = list[str]()
    async for event in await client.chat.completions.create(model="any", messages=messages, stream=True):
        if event.choices and (new := event.choices[0].delta.content):
            if not parts:
                tell(key, "told", turn=turn)
            parts.append(new)
    return "".join(parts)


async def converse(client: openai.AsyncOpenAI, key: str, turns: int) -> None:
    """One conversation, which no other begins like, and which ends with the first turn that is refused."""
    messages: list[Any] = [{"role": "user", "content": f"I am {key[:8]}"}]
    for turn in range(turns):
        tell(key, "asked", turn=turn)
        try:
            text = await answer(client, key, turn, messages)
        except openai.OpenAIError as error:
            tell(key, "refused", turn=turn, why=f"{type(error).__name__}: {error}")
            return
        tell(key, "answered", turn=turn, text=text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    tell(key, "over")


async def main() -> None:
    """Has the conversations that it is told of, until the input ends."""
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
    clients: dict[str, openai.AsyncOpenAI] = {}
    async with asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            told = json.loads(line)
            client = clients.setdefault(
                told["url"],
                openai.AsyncOpenAI(
                    base_url=f"{told['url']}/v1",
                    **dict(api_key="-", max_retries=0, timeout=600, http_client=http_client),
                ),
            )
            own = client.with_options(api_key=told["key"])
            group.create_task(converse(own, told["key"], told["turns"]))


if __name__ == "__main__":
    asyncio.run(main())
