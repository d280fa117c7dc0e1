"""``--custom-generate-function-path examples.calculator_tool.generate.generate``: at most one tool call.

user       47*28
assistant  <tool_call>47*28</tool_call>
tool       1316                               (not trained on)
assistant  \\boxed{1316}
"""

from argparse import Namespace
from typing import Any

from examples.calculator_tool.calculator import answer_call
from slime.rollout.generation import wanted_of_tokens
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 2


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model speak, answer its tool call, let it speak again.

    ``max_new_tokens`` of ``sampling_params`` holds for each turn. What the model said in each turn is
    left in ``sample.metadata["turns"]`` for the reward.
    """
    state = GenerateState(args)
    start_over(sample, state)
    turns: list[str] = []
    while True:
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, **wanted_of_tokens(args)}
        output = await post(get_model_url(args), payload)
        triples = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in triples],
            log_probs=[log_prob for log_prob, _, _ in triples],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        turns.append(output["text"])
        sample.metadata |= {"turns": turns, "round_number": len(turns)}
        # Only a turn that the model ended itself can hold a complete call.
        call = sample.status == Sample.Status.COMPLETED and len(turns) < MAX_TURNS
        result = answer_call(output["text"]) if call else None
        if result is None:
            return sample
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        text = render_tool_turn(state.tokenizer, result)
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=text)


def start_over(sample: Sample, state: GenerateState) -> None:
    """Begin with the prompt alone, also where an earlier attempt was aborted between turns."""
    sample.tokens = state.encode_prompt(sample)
    sample.response, sample.response_length = "", 0
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = None, None, []
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts, sample.version_spans = None, []


def render_tool_turn(tokenizer: Any, result: str) -> str:
    """What the chat template puts between the end of the assistant's turn and the start of its next."""
    user = {"role": "user", "content": ""}
    before = tokenizer.apply_chat_template([user], tokenize=False)
    after = tokenizer.apply_chat_template(
        [user, {"role": "tool", "content": result}], tokenize=False, add_generation_prompt=True
    )
    turn_end = before.rpartition(tokenizer.eos_token)[2]
    return turn_end + after.removeprefix(before)
