"""A conversation of several turns with a tool, for generate functions of one's own.

async def generate(args, sample, sampling_params):
    return await converse(args, sample, sampling_params, answer=my_tool, max_turns=4)
"""

from collections.abc import Callable
from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import policy_url, wanted_of_tokens
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def converse(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    answer: Callable[[str], str | None],
    max_turns: int,
) -> Sample:
    """Lets the model speak, answers what it said, and lets it speak again.

    What the model said in each turn is left in ``sample.metadata["turns"]`` for the reward. Tokens of the
    tool are part of the response and not trained on.

    Args:
        sampling_params: ``max_new_tokens`` holds for each turn.
        answer: what the tool says to a turn; None ends the conversation.
        max_turns: of the model; the last one is not answered.
    """
    state = GenerateState(args)
    start_over(sample, state)
    turns: list[str] = []
    while True:
        turns.append(await _speak(args, sample, sampling_params))
        sample.metadata |= {"turns": turns, "round_number": len(turns)}
        # Only a turn that the model ended itself can hold a complete call.
        goes_on = sample.status == Sample.Status.COMPLETED and len(turns) < max_turns
        result = answer(turns[-1]) if goes_on else None
        if result is None:
            return sample
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        text = render_tool_turn(state.tokenizer, result)
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=text)


async def _speak(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """Adds a turn of the model to the sample and returns its text."""
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, **wanted_of_tokens(args)}
    output = await post(policy_url(filled(GenerationConfig, args), sample), payload)
    triples = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in triples],
        log_probs=[log_prob for log_prob, _, _ in triples],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    text: str = output["text"]
    return text


def start_over(sample: Sample, state: GenerateState) -> None:
    """Begins with the prompt alone, also where an earlier attempt was aborted between turns."""
    without_answer(sample)
    sample.tokens = state.encode_prompt(sample)


def without_answer(sample: Sample) -> None:
    """Forgets what an attempt has made of a sample; its tokens stay."""
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
