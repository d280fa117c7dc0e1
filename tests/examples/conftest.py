"""An engine whose every answer is a function of all text so far, for conversations within one turn."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.fake import EOS, FakeEngine
from tests.rollout.conftest import *  # noqa: F403


class ContinuingEngine(FakeEngine):
    """``reply(text)`` gives what comes next; at a stop string of the request it ends, else with the EOS."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.reply: Callable[[str], str] = lambda text: "ok"
        self.weight_version = "1"

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.reply(self.tokenizer.decode(body["input_ids"]))
        params = body["sampling_params"]
        ends = [end for stop in params.get("stop") or [] if (end := text.find(stop) + len(stop)) >= len(stop)]
        ids = self.tokenizer(text[: min(ends)] if ends else text + EOS, add_special_tokens=False)["input_ids"]
        limit = params["max_new_tokens"]
        return {
            "text": self.tokenizer.decode(ids[:limit]),
            "output_ids": ids[:limit],
            "meta_info": {
                "finish_reason": {"type": "stop" if len(ids) <= limit else "length"},
                "output_token_logprobs": [[-0.25, token, None] for token in ids[:limit]],
                "weight_version": self.weight_version,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": min(len(ids), limit),
                "cached_tokens": 0,
            },
        }


@pytest.fixture
def engine(tokenizer):
    engine = ContinuingEngine(tokenizer)
    engine.start()
    yield engine
    engine.stop()
