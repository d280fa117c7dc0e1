"""A command-line agent as the harnesses start one, written from the public protocols with Python alone.

claude --print ... < PROMPT        Anthropic's messages, streamed; CLAUDE_CONFIG_DIR and ANTHROPIC_*
codex exec ... - < PROMPT          OpenAI's responses, streamed; CODEX_HOME
other PROMPT_FILE                  OpenAI's chat completions; OPENAI_*, and a configuration in JSON

It runs the commands that the model asks for until the model asks for none. What it was started with, and what
other processes see of it, it writes to ``seen.json`` in its working directory.
"""

import json
import os
import stat
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOOL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
Headers = Mapping[str, str]


def main() -> None:
    kind = Path(sys.argv[0]).name
    prompt = Path(sys.argv[1]).read_text() if kind == "other" else sys.stdin.read()
    configured = {"claude": _claude_config, "codex": _codex_config, "other": _other_config}[kind]()
    seen = {
        "prompt": prompt,
        "config": configured.read_text(),
        "mode": oct(stat.S_IMODE(configured.stat().st_mode)),
        "command_lines": [path.read_bytes().decode() for path in Path("/proc").glob("[0-9]*/cmdline")],
    }
    Path("seen.json").write_text(json.dumps(seen))
    (_claude if kind == "claude" else _codex if kind == "codex" else _other)(prompt)


def _claude_config() -> Path:
    path = Path(os.environ["CLAUDE_CONFIG_DIR"], "settings.json")
    assert json.loads(path.read_text())["permissions"]["defaultMode"] == "bypassPermissions"
    assert {"--print", "--dangerously-skip-permissions"} <= set(sys.argv)
    return path


def _codex_config() -> Path:
    assert sys.argv[1] == "exec" and sys.argv[-1] == "-"
    return Path(os.environ["CODEX_HOME"], "config.toml")


def _other_config() -> Path:
    return Path(os.environ["AGENT_CONFIG"])


def _claude(prompt: str) -> None:
    headers = {"Authorization": f"Bearer {os.environ['ANTHROPIC_AUTH_TOKEN']}"}
    url = f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages?beta=true"
    tools = [{"name": "bash", "description": "Runs a command.", "input_schema": TOOL}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    while True:
        body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 500, "tools": tools, "stream": True}
        blocks = _streamed(url, headers, {**body, "messages": messages})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            return
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": _run(call["input"]["command"])}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def _streamed(url: str, headers: Headers, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Puts the blocks of an answer together from its events."""
    blocks: list[dict[str, Any]] = []
    for event in _events(url, headers, body):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block["text"] += delta["text"]
    return blocks


def _events(url: str, headers: Headers, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with _post(url, headers, body) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def _codex(prompt: str) -> None:
    config = tomllib.loads(_codex_config().read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses" and config["projects"][os.getcwd()]["trust_level"] == "trusted"
    headers = {"Authorization": f"Bearer {os.environ[provider['env_key']]}"}
    tool = {"type": "function", "name": "bash", "description": "Runs.", "strict": False, "parameters": TOOL}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt}]}
    body = {"model": config["model"], "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True}
    body |= {"stream": True, "store": False, "reasoning": {}, "include": ["reasoning.encrypted_content"]}
    items: list[dict[str, Any]] = [asked]
    while True:
        events = list(_events(f"{provider['base_url']}/responses", headers, {**body, "input": items}))
        assert events[-1]["type"] == "response.completed"
        said = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        calls = [item for item in said if item["type"] == "function_call"]
        if not calls:
            return
        items += said
        for call in calls:
            output = _run(json.loads(call["arguments"])["command"])
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


def _other(prompt: str) -> None:
    config = json.loads(_other_config().read_text())
    _chat(prompt, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], config["model"])


def _chat(prompt: str, base_url: str, key: str, model: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    function = {"name": "bash", "description": "Runs a command.", "parameters": TOOL}
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    while True:
        body = {"model": model, "messages": messages, "tools": [{"type": "function", "function": function}]}
        with _post(f"{base_url}/chat/completions", headers, body) as response:
            message = json.load(response)["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            said = _run(json.loads(call["function"]["arguments"])["command"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


def _post(url: str, headers: Headers, body: Mapping[str, Any]) -> Any:
    everything = {"Content-Type": "application/json", **headers}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), everything))


def _run(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
