"""Environments of OpenEnv, which servers play: ``pip install 'slime[openenv]'``, and openenv-core.

generate = Episodes(
    "slime.environments.openenv_text.OpenEnvText",
    {"url": "http://127.0.0.1:8000", "field": "message"},
)
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from slime.environments.protocol import Answer, Step
from slime.utils.http_utils import get

TOOL = "act"
"""The tool whose arguments are an action, where a turn's text is none."""
_SCHEMA_RETRIES = 3
_WAIT_S = 24 * 3600.0  # `Episodes` says how long a call may take
_ROOM_S, _ROOM_PAUSE_S = 10.0, 0.1
"""How long a full server is asked: it ends a session some time after its client has left."""
_INVALID = re.compile(r"\(code: (?:WSErrorCode\.)?VALIDATION_ERROR\)")
_FULL = re.compile(r"\(code: (?:WSErrorCode\.)?CAPACITY_REACHED\)")


class OpenEnvText:
    """A session with a server of OpenEnv, whose model reads and writes text or calls a tool.

    Actions and observations are JSON as the server's schemas have them, and none of its code runs here. With
    ``field`` the text of a turn is that field of the action; without, the model is offered the tool ``act``
    with the schema of an action. An action that the server calls invalid changes nothing, and the model is
    told so. It sees the observation as JSON, or a field of it alone if that is a text.

    Args:
        url: of the server, which has to allow as many sessions as there are episodes at a time.
        field: of the action, a text.
        action: further fields of each action.
        shown: fields of the observation; all of them without it.
        instructions: said first.
        no_action_reward: of a turn with no action, or an invalid one.
    """

    def __init__(
        self,
        url: str,
        field: str | None = None,
        action: Mapping[str, Any] | None = None,
        shown: Sequence[str] = (),
        instructions: str = "",
        no_action_reward: float = 0.0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url {url!r} (wanted: http://HOST:PORT or https:// of a server of OpenEnv)")
        self._url, self._field, self._action = url.rstrip("/"), field, dict(action or {})
        self._shown, self._instructions = tuple(shown), instructions
        self._no_action_reward = no_action_reward
        self._client: Any = None
        self.tools: list[dict[str, Any]] = []

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begins an episode; ``seed`` in the row's metadata comes first, its ``options`` are the reset's."""
        schema = (await get(f"{self._url}/schema", _SCHEMA_RETRIES))["action"]
        self._check(schema)
        self.tools = [] if self._field is not None else [_tool(schema, self._action)]
        given = task["metadata"]
        asked = {"seed": given.get("seed", seed), **(given.get("options") or {})}
        deadline = time.monotonic() + _ROOM_S
        while (observation := await self._begun(asked, deadline)) is None:
            await asyncio.sleep(_ROOM_PAUSE_S)
        return "\n".join(filter(None, [self._instructions, self._told(observation)]))

    async def step(self, answer: Answer) -> Step:
        """Takes the action of a turn."""
        action = self._action_of(answer)
        if action is None:
            return Step(f"That is no action (wanted: a call of {TOOL}).", self._no_action_reward)
        try:
            result = await self._client.step(action)
        except RuntimeError as error:  # what the library makes of a server's refusal
            if not _INVALID.search(str(error)):
                raise
            return Step("That is no valid action.", self._no_action_reward)
        return Step(self._told(result.observation), float(result.reward or 0.0), bool(result.done))

    async def _begun(self, asked: Mapping[str, Any], deadline: float) -> Any:
        """The first observation; None if the server has no room yet, of which it says so or hangs up."""
        from openenv.core.generic_client import GenericEnvClient  # not for whoever only looks for classes
        from websockets.exceptions import ConnectionClosed

        await self.close()
        self._client = GenericEnvClient(self._url, message_timeout_s=_WAIT_S, mode="simulation")
        try:
            return (await self._client.reset(**asked)).observation
        except (RuntimeError, ConnectionClosed) as error:
            if isinstance(error, RuntimeError) and not _FULL.search(str(error)):
                raise
            if time.monotonic() < deadline:
                return None
            raise RuntimeError(
                f"{self._url}: no session within {_ROOM_S:g} s: {error} (wanted: a "
                "max_concurrent_envs of its create_app of as many as there are episodes at a time)"
            ) from error

    async def close(self) -> None:
        """Ends the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _check(self, schema: Mapping[str, Any]) -> None:
        """Refuses fields that the server's actions do not have, and the lack of those that they must have."""
        known = schema.get("properties", {})
        own = [*self._action, *([] if self._field is None else [self._field])]
        for name in own:
            if name not in known:
                raise ValueError(f"{self._url}: its actions have no {name!r} (wanted: of {sorted(known)})")
        missing = [name for name in schema.get("required", ()) if name not in own]
        if self._field is not None and missing:
            raise ValueError(f"{self._url}: its actions need {missing} too (wanted: `action`, or no `field`)")

    def _action_of(self, answer: Answer) -> dict[str, Any] | None:
        if self._field is not None:
            return {**self._action, self._field: answer.text}
        calls = [call for call in answer.calls if call.name == TOOL]
        return {**calls[-1].arguments, **self._action} if calls else None

    def _told(self, observation: Mapping[str, Any]) -> str:
        if missing := [name for name in self._shown if name not in observation]:
            raise ValueError(
                f"{self._url}: its observations have no {missing} (wanted: of {sorted(observation)})"
            )
        told = {name: observation[name] for name in self._shown} if self._shown else dict(observation)
        only = next(iter(told.values())) if len(told) == 1 else None
        return only if isinstance(only, str) else json.dumps(told, ensure_ascii=False)


def _tool(schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The tool that acts, without the fields that are given, nor the library's own."""
    hidden = {*given, "metadata"}
    properties = {name: value for name, value in schema.get("properties", {}).items() if name not in hidden}
    required = [name for name in schema.get("required", ()) if name not in hidden]
    parameters = {**schema, "properties": properties, "required": required}
    function = {"name": TOOL, "description": schema.get("description", "Act."), "parameters": parameters}
    return {"type": "function", "function": function}
