"""``--custom-generate-function-path examples.retool.generate.generate``: reason, run code, go on, answer.

user       What is 47 * 28?
assistant  <code>print(47 * 28)</code>
           <interpreter>1316</interpreter>     (not trained on)
           Answer: \\boxed{1316}

The conversation is one assistant turn: results stand in it where the code ended, as in ReTool.
"""

import time
from argparse import Namespace
from typing import Any

from examples.retool.calls import ENDS_OF_CODE, INVALID_ACTION, find_code, has_answer, render_result
from examples.retool.interpreter import Interpreter
from slime.rollout.generation import wanted_of_tokens
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 16


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model speak and run its code, at most ``args.retool_max_turns`` (16) times.

    ``max_new_tokens`` of ``sampling_params`` bounds the whole response, results included. The metadata hold
    ``round_number``, the turns of the model, and ``tool_calls``, the pieces of code that were run.
    """
    state = GenerateState(args)
    _start_over(sample, state)
    budget = sampling_params["max_new_tokens"]
    params = {**sampling_params, "stop": [*(sampling_params.get("stop") or []), *ENDS_OF_CODE]}
    max_turns = getattr(args, "retool_max_turns", MAX_TURNS)
    async with Interpreter(args) as interpreter:
        for turn in range(1, max_turns + 1):
            params["max_new_tokens"] = budget - sample.response_length
            text = await _speak(args, sample, params)
            sample.metadata["round_number"] = turn
            # Only a turn that the model ended itself can hold a whole call.
            if sample.status != Sample.Status.COMPLETED or has_answer(text):
                return sample
            if turn == max_turns:
                break
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            if not _hear(sample, state, await _observe(sample, interpreter, text), budget):
                break
    sample.status = Sample.Status.TRUNCATED
    return sample


async def _speak(args: Namespace, sample: Sample, params: dict[str, Any]) -> str:
    payload = {"input_ids": sample.tokens, "sampling_params": params, **wanted_of_tokens(args)}
    output = await post(get_model_url(args), payload)
    triples = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[triple[1] for triple in triples],
        log_probs=[triple[0] for triple in triples],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return output["text"]


async def _observe(sample: Sample, interpreter: Interpreter, text: str) -> str:
    code = find_code(text)
    if code is None:
        return INVALID_ACTION
    begun = time.monotonic()
    result = await interpreter.run(code)
    sample.non_generation_time += time.monotonic() - begun
    sample.metadata["tool_calls"] += 1
    return render_result(result)


def _hear(sample: Sample, state: GenerateState, text: str, budget: int) -> bool:
    """Append what the model did not say; False if nothing would be left for it to say more."""
    ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
    if sample.response_length + len(ids) >= budget:
        return False
    sample.append_response_tokens(None, tokens=ids, trainable=False, text=text)
    return True


def _start_over(sample: Sample, state: GenerateState) -> None:
    """Begin with the prompt alone, also where an earlier attempt was aborted: its files are gone."""
    sample.tokens = state.encode_prompt(sample)
    sample.response, sample.response_length = "", 0
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = None, None, []
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts, sample.version_spans = None, []
    sample.metadata |= {"round_number": 0, "tool_calls": 0}
