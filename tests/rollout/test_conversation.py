"""Model and tool speak in turns, and what the tool says is not trained on."""

import pytest

from slime.rollout.conversation import converse, render_tool_turn
from slime.rollout.generate_state import GenerateState
from slime.utils.types import Sample
from tests.engines.fake import EOS, HEADER

PROMPT = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"


class Tool:
    """Says "more" to the first turns, so many of them."""

    def __init__(self, times):
        self.times, self.heard = times, []

    def __call__(self, text):
        self.heard.append(text)
        return "more" if len(self.heard) <= self.times else None


@pytest.fixture
def talk(engine, make_args):
    """A conversation with a model that counts its turns: the sample, and what the tool heard."""
    engine.answer = lambda conversation: f"say {conversation.count(HEADER)}"

    async def run(tool, max_turns=9, most=32, **sample):
        made = Sample(prompt=PROMPT, index=0, **sample)
        found = await converse(make_args(), made, {"max_new_tokens": most}, tool, max_turns)
        assert found is made
        return found, tool.heard

    return run


async def test_each_turn_is_answered_until_the_tool_has_nothing_to_say(talk, tokenizer):
    sample, heard = await talk(Tool(2))
    assert heard == sample.metadata["turns"] == [f"say {turn}{EOS}" for turn in range(3)]
    assert sample.metadata["round_number"] == 3 and sample.status is Sample.Status.COMPLETED
    between = render_tool_turn(tokenizer, "more")
    assert between.startswith("\n") and between.endswith(HEADER) and "more" in between
    parts = [heard[0], between, heard[1], between, heard[2]]
    assert sample.response == "".join(parts)
    assert tokenizer.decode(sample.tokens) == PROMPT + sample.response
    lengths = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts]
    trained = [mask for part, mask in enumerate([1, 0, 1, 0, 1]) for _ in range(lengths[part])]
    assert sample.loss_mask == trained and sample.response_length == sum(lengths)
    assert sample.rollout_log_probs == [-0.25 * mask for mask in trained]


async def test_the_last_turn_is_not_answered(talk):
    sample, heard = await talk(Tool(9), max_turns=2)
    assert len(heard) == 1 and len(sample.metadata["turns"]) == 2
    assert sample.response.endswith(f"say 1{EOS}")


async def test_a_turn_that_was_cut_off_is_not_answered(talk):
    sample, heard = await talk(Tool(9), most=3)
    assert heard == [] and sample.metadata["turns"] == ["say"]
    assert sample.status is Sample.Status.TRUNCATED


async def test_an_abort_ends_the_conversation_between_two_turns(talk, make_args):
    class Aborts(Tool):
        def __call__(self, text):
            GenerateState(make_args()).aborted = True
            return super().__call__(text)

    sample, heard = await talk(Aborts(9))
    assert len(heard) == 1 and sample.status is Sample.Status.ABORTED
    assert sample.response == f"say 0{EOS}"


async def test_it_begins_with_the_prompt_alone(talk):
    fresh, _ = await talk(Tool(0))
    begun = {
        **{"tokens": [1, 2, 3], "response": "x", "response_length": 1, "loss_mask": [0]},
        **{"rollout_log_probs": [-1.0], "weight_versions": ["0"], "version_spans": [("0", 1)]},
        **{"rollout_top_p_token_ids": [7], "rollout_top_p_token_offsets": [0, 1]},
        **{"status": Sample.Status.ABORTED},
    }
    again, _ = await talk(Tool(0), **begun)
    assert again == fresh
