"""Whether engines serve the policy that is trained: both sides' log-probs of one text, beside each other.

An engine may load a checkpoint otherwise than the trainer and say nothing of it: with a layer that it fills
at random, another rope, a scale that it leaves out. It then answers with noise, or with nearly the policy.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from slime.arguments.trainers import trainer_of
from slime.arguments.validate.served_models import ServerGroupConfig
from slime.arguments.views import FleetView
from slime.backends.sglang_utils.client import EngineClient
from slime.models.checkpoint.quantization import KEYS
from slime.models.hf_config import HfConfig
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)

BOUNDS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1, "quantised": 0.5}
"""Mean absolute difference of log-probs that the coarsest number format of the two sides explains."""
_OTHER_NAMES = {"half": "float16", "float": "float32"}
_TOKENS = 128
_LEAST = 16  # what a context leaves for the answer
_TEXT = """A ladder of 13 metres leans on a wall; its foot stands 5 metres away. How high does it reach?
By Pythagoras 13 * 13 - 5 * 5 = 169 - 25 = 144, so the answer is 12 metres. In Python one would write:

def height(ladder: float, foot: float) -> float:
    return (ladder ** 2 - foot ** 2) ** 0.5

and print(height(13, 5)), which shows 12.0. Had somebody moved the foot two metres further out, the ladder
would still reach nearly eleven metres, as you can check yourself.
"""


class PolicyMismatch(RuntimeError):
    """An engine answers with another policy than the one that is trained."""


def probe_tokens(args: FleetView) -> list[int]:
    """The ids of a text, as many as any context of the run holds, at most 128."""
    tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    ids = [i for i in tokenizer.encode(_TEXT, add_special_tokens=False) if i < args.vocab_size]
    room = min([_TOKENS + _LEAST, *_contexts(args)]) - _LEAST
    return list(islice(cycle(ids or range(args.vocab_size)), max(room, 2)))


def _contexts(args: FleetView) -> Iterator[int]:
    config = HfConfig.read(args.hf_checkpoint).text
    limits = [config.get("max_position_embeddings"), args.rollout_max_context_len]
    limits += [_option(args, group, "context_length") for group in _groups(args)]
    yield from (limit for limit in limits if isinstance(limit, int))


def _groups(args: FleetView) -> list[ServerGroupConfig | None]:
    """Returns the groups of engines that get the trainer's weights; None stands for what flags say."""
    return [
        None,
        *(group for model in args.served_models if model.update_weights for group in model.server_groups),
    ]


def _option(args: FleetView, group: ServerGroupConfig | None, name: str) -> object:
    given = getattr(args, f"sglang_{name}", None)
    return group.overrides.get(name, given) if group else given


def number_format(args: FleetView) -> str:
    """The coarsest number format of trainer and engines, a key of `BOUNDS`."""
    config = HfConfig.read(args.synced_checkpoint)
    found = {str(args.params_dtype).removeprefix("torch.")}
    for group in _groups(args):
        if _option(args, group, "quantization") or "8" in str(_option(args, group, "kv_cache_dtype")):
            return "quantised"
        dtype = _option(args, group, "dtype")
        if dtype not in (None, "auto"):
            found.add(_OTHER_NAMES.get(str(dtype), str(dtype)))
        elif args.bf16 or args.rollout_external:
            found.add(config.dtype or "bfloat16")
    if config.mapping(*KEYS):
        return "quantised"
    return max(found, key=lambda name: BOUNDS.get(name, math.inf))


def log_probs_of(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """The engine's log-probs of all tokens but the first.

    Raises:
        EngineError: it did not answer, or refused.
    """
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    entries = client.request("POST", "/generate", body)["meta_info"]["input_token_logprobs"]
    return [math.nan if entry[0] is None else float(entry[0]) for entry in entries[1:]]


def require_same_policy(
    args: FleetView, engine: str, found: Sequence[float], expected: Sequence[float]
) -> float:
    """How far an engine's log-probs are from the trainer's, on average.

    Raises:
        PolicyMismatch: further than the bound, or it is not the same number of them.
    """
    kind = number_format(args)
    bound = args.served_policy_bound or BOUNDS.get(kind, BOUNDS["quantised"])
    if len(found) != len(expected):
        raise PolicyMismatch(f"{engine}: {len(found)} log-probs of a prompt, wanted {len(expected)}")
    gap = _mean([abs(a - b) for a, b in zip(found, expected, strict=True)])
    if gap <= bound:  # not so for NaN either
        return gap
    origin = "--served-policy-bound" if args.served_policy_bound else kind
    raise PolicyMismatch(
        f"{engine} ({args.rollout_engine}) does not serve the policy of the {trainer_of(args).name} trainer: "
        f"on a prompt of {len(expected) + 1} tokens their log-probs are {gap:.2g} apart on average, wanted "
        f"at most {bound:g} ({origin}); the mean is {_mean(expected):.4f} in the trainer, "
        f"{_mean(found):.4f} in the engine. Look at what one of them reads otherwise in config.json of "
        f"{args.synced_checkpoint} (model_type {_model_type(args)}: rope, tied embeddings, dense layers, "
        "windows, quantization), at --sglang-dtype and --sglang-quantization, and at the engine's log for "
        "weights that it did not find (--no-check-served-policy goes on without)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _model_type(args: FleetView) -> object:
    return HfConfig.read(args.synced_checkpoint).get("model_type")
