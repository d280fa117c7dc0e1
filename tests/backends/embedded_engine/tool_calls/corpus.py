"""Responses with calls of tools and with reasoning, in the formats of all parsers."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

WEATHER = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "opt": {"type": "object"},
    "x": {"type": "number"},
    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": WEATHER, "required": ["city"]}},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
]
RICH = {"days": 3, "exact": True, "tags": ["a", "b c"], "opt": {"k": [1, 2.5, None]}, "x": -1.5e3}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Paris"}),
    ("get_weather", {"city": 'São "Paulo" \\ / \n\t <b> {x} [y]', **RICH}),
    ("now", {}),
    ("add", {"a": 1, "b": 2.5}),
    ("unknown", {"z": 1}),
    ("get_weather", {"city": "北京 😀", "any": None}),
]
Made = list[tuple[str, dict[str, Any]]]
Separators = tuple[str, str] | None


def _json(value: Any, separators: Separators) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _tagged(arguments: dict[str, Any], separators: Separators, one: str) -> str:
    texts = {k: v if isinstance(v, str) else _json(v, separators) for k, v in arguments.items()}
    return "".join(one.format(key=key, value=value) for key, value in texts.items())


def writers(sep: Separators) -> dict[str, Callable[[Made], str]]:
    """What a model of each format writes for calls; the parser's name is what is before ``/``."""

    def objects(made: Made, key: str = "arguments") -> list[str]:
        return [_json({"name": name, key: arguments}, sep) for name, arguments in made]

    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    coder, glm = (
        "<parameter={key}>\n{value}\n</parameter>\n",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    )
    kimi = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    return {
        "qwen25": lambda made: "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects(made)),
        "hermes": lambda made: "".join(f"<tool_call>{o}</tool_call>" for o in objects(made)),
        "llama3": lambda made: "<|python_tag|>" + ";".join(objects(made, "parameters")),
        "llama3/bare": lambda made: ";".join(objects(made, "parameters")),
        "mistral": lambda made: "[TOOL_CALLS] [" + ", ".join(objects(made)) + "]",
        "mistral/compact": lambda made: "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a, sep)}" for n, a in made),
        "deepseekv3": lambda made: (
            all_begin
            + "\n".join(f"{begin}function{separator}{n}\n```json\n{_json(a, sep)}\n```{end}" for n, a in made)
            + all_end
        ),
        "deepseekv31": lambda made: (
            all_begin + "".join(f"{begin}{n}{separator}{_json(a, sep)}{end}" for n, a in made) + all_end
        ),
        "kimi_k2": lambda made: (
            "<|tool_calls_section_begin|>"
            + "".join(kimi.format(n, i, _json(a, sep)) for i, (n, a) in enumerate(made))
            + "<|tool_calls_section_end|>"
        ),
        "qwen3_coder": lambda made: "\n".join(
            f"<tool_call>\n<function={n}>\n{_tagged(a, sep, coder)}</function>\n</tool_call>" for n, a in made
        ),
        "glm45": lambda made: "\n".join(
            f"<tool_call>{n}\n{_tagged(a, sep, glm)}</tool_call>" for n, a in made
        ),
        "pythonic": lambda made: (
            "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in made) + "]"
        ),
    }


def tool_texts(rounds: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Parsers and texts, some cut off."""
    chance = random.Random(seed)
    for _ in range(rounds):
        for name, write in writers(chance.choice([None, (",", ":")])).items():
            made = [chance.choice(CALLS) for _ in range(chance.choice([0, 1, 1, 2, 3]))]
            before = (
                "" if name == "llama3/bare" else chance.choice(["", "Let me look.\n", "a < b [1] {2} <tool"])
            )
            text = before + (write(made) if made else "") + chance.choice(["", "", "\nDone."])
            yield (
                name.split("/")[0],
                text[: chance.randrange(len(text))] if text and chance.random() < 0.1 else text,
            )


REASONING = [
    *(
        "plain",
        "",
        "<think>",
        "<think>a b\n</think>\n\nanswer",
        "a b</think>answer",
        "<think>never ends",
        "</think>x",
    ),
    *(
        "<think><think>twice</think>x",
        "x <think>late</think> y",
        "<think>a<tool_call>{}</tool_call>",
        "a</think>b</think>c",
    ),
    *(
        "<think>a\n<tool_call>\nb</think>c",
        "◁think▷a◁/think▷b",
        "a◁/think▷b",
        "a<|tool_calls_section_begin|>b",
        "<thin",
    ),
    *("<think>a</thin", "\n<think>a</think>b", "<think></think>b"),
]
"""Texts that each reasoning parser reads, of a model that was asked to reason and of one that was not."""
