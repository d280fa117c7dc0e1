"""``--custom-generate-function-path examples.search_r1.generate_with_search.generate``.

user       Who rules Lorvia? ...
assistant  <search>ruler of Lorvia</search>
tool       <information>Doc 1: ...</information>      (not trained on)
assistant  <answer>Queen Ada</answer>

Keys of ``--custom-config-path``: ``search_url`` (of a server as ``server.py``) or ``search_corpus`` (JSONL,
for an index in this process), ``search_top_k`` (3), ``search_max_turns`` (3) and ``search_format_score``
(0.0), the reward of a wrong answer in the right form.
"""

import asyncio
import re
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from typing import Any

from examples.calculator_tool.generate import start_over
from examples.search_r1.bm25 import BM25Index
from examples.search_r1.exact_match import is_exact_match, targets_of
from slime.rollout.generation import wanted_of_tokens
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

_STOPS = ["</search>", "</answer>"]
_QUERY = re.compile(r"<search>([^<]*)</search>\s*$")
_ANSWER = re.compile(r"<answer>([^<]*)</answer>\s*(<\|[^|]*\|>)?\s*$")


@cache
def load_index(path: str) -> BM25Index:
    return BM25Index.from_jsonl(path)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model speak, look up what it asks for, let it go on, until it answers.

    The engine stops at a closing tag, so that the response is what the engine made, token by token.
    ``max_new_tokens`` of ``sampling_params`` counts the whole response, passages included.
    """
    state = GenerateState(args)
    start_over(sample, state)
    for turn in range(getattr(args, "search_max_turns", 3) + 1):
        left = sampling_params["max_new_tokens"] - sample.response_length
        if left <= 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        stops = [*(sampling_params.get("stop") or []), *_STOPS]
        spoken = await _speak(args, sample, sampling_params | {"max_new_tokens": left, "stop": stops})
        sample.metadata["round_number"] = turn + 1
        query = _QUERY.search(spoken)
        if sample.status != Sample.Status.COMPLETED or query is None:
            return sample
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        passages = await find(args, query[1])
        text = render_passages(passages)
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=text)
    sample.status = Sample.Status.TRUNCATED  # it asked once more than it may
    return sample


async def find(args: Namespace, query: str) -> Sequence[str]:
    """The passages for a query: of the search server if there is one, else of the index in this process."""
    top_k = getattr(args, "search_top_k", 3)
    if url := getattr(args, "search_url", None):
        asked = {"queries": [query], "topk": top_k, "return_scores": True}
        (found,) = (await post(f"{url}/retrieve", asked))["result"]
        return [one["document"]["contents"] for one in found]
    index = await asyncio.to_thread(load_index, args.search_corpus)
    return await asyncio.to_thread(index.search, query, top_k)


async def _speak(args: Namespace, sample: Sample, params: dict[str, Any]) -> str:
    payload = {"input_ids": sample.tokens, "sampling_params": params, **wanted_of_tokens(args)}
    output = await post(get_model_url(args), payload)
    triples = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in triples],
        log_probs=[log_prob for log_prob, *_ in triples],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return output["text"]


def render_passages(passages: Any) -> str:
    """What the model reads after a search. No passage can close the block or open a tag of its own."""
    lines = [f"Doc {number}: {text}" for number, text in enumerate(passages, start=1)] or ["nothing found"]
    return "\n<information>" + "\n".join(lines).replace("<", "&lt;") + "</information>\n"


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 for the right ``<answer>`` at the end; a wrong one earns ``search_format_score``, none earns 0."""
    answer = _ANSWER.search(sample.response)
    if answer is None:
        return 0.0
    right = is_exact_match(answer[1], targets_of(sample.label))
    return 1.0 if right else float(getattr(args, "search_format_score", 0.0))
