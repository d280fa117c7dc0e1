"""The formats by the names that ``--tool-call-parser`` takes."""

from slime.backends.embedded_engine.tool_calls.base import ToolFormat
from slime.backends.embedded_engine.tool_calls.json_formats import (
    DeepSeekV3,
    DeepSeekV31,
    Hermes,
    KimiK2,
    Llama,
    Mistral,
    Qwen,
)
from slime.backends.embedded_engine.tool_calls.pythonic import Pythonic
from slime.backends.embedded_engine.tool_calls.tagged_formats import Glm45, Qwen3Coder

FORMATS: dict[str, ToolFormat] = {
    "qwen": Qwen(),
    "qwen25": Qwen(),
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3": Llama(),
    "mistral": Mistral(),
    "deepseekv3": DeepSeekV3(),
    "deepseekv31": DeepSeekV31(),
    "glm": Glm45(),
    "glm45": Glm45(),
    "kimi_k2": KimiK2(),
    "pythonic": Pythonic(),
}
