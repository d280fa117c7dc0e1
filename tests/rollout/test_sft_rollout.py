import json

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sft_rollout import generate_rollout


@pytest.fixture
def sft_args(make_args, tmp_path):
    def make(messages):
        path = tmp_path / "sft.jsonl"
        path.write_text(json.dumps({"messages": messages}))
        return make_args(
            prompt_data=str(path),
            input_key="messages",
            label_key=None,
            apply_chat_template=False,
            n_samples_per_prompt=1,
        )

    return make


def test_the_response_begins_at_the_first_trained_token(sft_args, tokenizer):
    messages = [
        {"role": "user", "content": "2*3"},
        {"role": "assistant", "content": "<tool_call>2*3</tool_call>"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "\\boxed{6}"},
    ]
    args = sft_args(messages)
    source = RolloutDataSourceWithBuffer(args)
    groups = generate_rollout(args, 0, source)
    assert len(groups) == 3
    sample = groups[0][0]
    response = sample.tokens[-sample.response_length :]
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(response).startswith("<tool_call>2*3</tool_call><|im_end|>\n<|im_start|>user")
    trained = [token for token, used in zip(response, sample.loss_mask, strict=True) if used]
    assert tokenizer.decode(trained) == "<tool_call>2*3</tool_call><|im_end|>\n\\boxed{6}<|im_end|>\n"
    assert (sample.reward, sample.status.value) == (0, "completed")
    assert source.ledger.trained == source.ledger.issued == 3


def test_a_conversation_without_an_assistant_teaches_nothing(sft_args):
    args = sft_args([{"role": "user", "content": "hi"}])
    ((sample,), *_) = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert (sample.response_length, sample.loss_mask) == (1, [0])
    assert len(sample.tokens) > 1


def test_text_prompts_groups_and_evaluation_are_refused(make_args):
    args = make_args(n_samples_per_prompt=1)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(RolloutError, match="the prompt is str, expected a message list"):
        generate_rollout(args, 0, source)
    with pytest.raises(RolloutError, match="--n-samples-per-prompt 2: expected 1"):
        generate_rollout(make_args(), 0, source)
    with pytest.raises(RolloutError, match="pass --eval-function-path"):
        generate_rollout(args, 0, source, evaluation=True)


def test_a_conversation_that_the_template_cannot_render_is_named(sft_args):
    args = sft_args([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    with pytest.raises(RolloutError, match="failed on sample 0 of group 0: ValueError: the chat template"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
