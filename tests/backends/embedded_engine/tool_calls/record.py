"""Writes down what SGLang's own parsers make of the corpus: run it where SGLang is installed.

python -m tests.backends.embedded_engine.tool_calls.record
"""

import json
from pathlib import Path
from typing import Any

from tests.backends.embedded_engine.tool_calls.corpus import REASONING, TOOLS, tool_texts

ANSWERS = Path(__file__).with_name("sglang_0.5.23.json")
REASONING_PARSERS = (
    *("deepseek-r1", "deepseek-v3", "glm45", "interns1", "kimi", "kimi_k2", "mimo", "minimax", "qwen3"),
    *("qwen3-thinking", "step3"),
)


def record() -> dict[str, list[Any]]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tools = [Tool(type="function", function=function) for function in TOOLS]
    calls = []
    for name, text in tool_texts(12):
        parser = FunctionCallParser(tools, name)
        content, found = parser.parse_non_stream(text) if parser.has_tool_call(text) else (text, [])
        calls.append([name, text, content, [[call.name, call.parameters] for call in found]])
    reasoning = []
    for name in REASONING_PARSERS:
        for text in REASONING:
            for forced in (False, True):
                thought, content = ReasoningParser(name, force_reasoning=forced).parse_non_stream(text)
                reasoning.append([name, forced, text, thought, content])
    return {"calls": calls, "reasoning": reasoning}


if __name__ == "__main__":
    lines = [
        f'"{kind}": [\n' + ",\n".join(json.dumps(e, ensure_ascii=False) for e in entries) + "\n]"
        for kind, entries in record().items()
    ]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
