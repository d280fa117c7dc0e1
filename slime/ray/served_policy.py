"""Whether engines serve the policy that is trained: both sides' log-probs of one text, beside each other.

An engine may load a checkpoint otherwise than the trainer and say nothing of it: with a layer that it fills
at random, another rope, a scale that it leaves out. It then answers with noise, or with nearly the policy.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from slime.backends.sglang_utils.client import EngineClient
from slime.config.fleet import FleetConfig
from slime.config.run import options_of
from slime.config.served_models import ServerGroupConfig
from slime.config.trainers import trainer_of
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


def probe_tokens(config: FleetConfig) -> list[int]:
    """The ids of a text, as many as any context of the run holds, at most 128."""
    tokenizer = load_tokenizer(config.hf_checkpoint.hf_checkpoint, config.hf_checkpoint.trust_remote_code)
    ids = [i for i in tokenizer.encode(_TEXT, add_special_tokens=False) if i < config.model.vocab_size]
    room = min([_TOKENS + _LEAST, *_contexts(config)]) - _LEAST
    return list(islice(cycle(ids or range(config.model.vocab_size)), max(room, 2)))


def _contexts(config: FleetConfig) -> Iterator[int]:
    hf = HfConfig.read(config.hf_checkpoint.hf_checkpoint).text
    limits = [hf.get("max_position_embeddings"), config.rollout.rollout_max_context_len]
    limits += [_option(config, group, "context_length") for group in _groups(config)]
    yield from (limit for limit in limits if isinstance(limit, int))


def _groups(config: FleetConfig) -> list[ServerGroupConfig | None]:
    """Returns the groups of engines that get the trainer's weights; None stands for what flags say."""
    return [
        None,
        *(
            group
            for model in config.engines.served_models
            if model.update_weights
            for group in model.server_groups
        ),
    ]


def _option(config: FleetConfig, group: ServerGroupConfig | None, name: str) -> object:
    given = options_of(config, "sglang_").get(name)
    return group.overrides.get(name, given) if group else given


def number_format(config: FleetConfig) -> str:
    """The coarsest number format of trainer and engines, a key of `BOUNDS`."""
    served = HfConfig.read(config.engines.synced_checkpoint)
    found = {str(config.precision.params_dtype).removeprefix("torch.")}
    for group in _groups(config):
        if _option(config, group, "quantization") or "8" in str(_option(config, group, "kv_cache_dtype")):
            return "quantised"
        dtype = _option(config, group, "dtype")
        if dtype not in (None, "auto"):
            found.add(_OTHER_NAMES.get(str(dtype), str(dtype)))
        elif config.precision.bf16 or config.engines.rollout_external:
            found.add(served.dtype or "bfloat16")
    if served.mapping(*KEYS):
        return "quantised"
    return max(found, key=lambda name: BOUNDS.get(name, math.inf))


def log_probs_of(client: EngineClient, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
    """The engine's log-probs of all tokens but the first.

    Args:
        adapter: with which it is to compute them; without one the base.

    Raises:
        EngineError: it did not answer, or refused.
    """
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({"lora_path": adapter} if adapter else {}),
    }
    entries = client.request("POST", "/generate", body)["meta_info"]["input_token_logprobs"]
    return [math.nan if entry[0] is None else float(entry[0]) for entry in entries[1:]]


def require_same_policy(
    config: FleetConfig, engine: str, found: Sequence[float], expected: Sequence[float]
) -> float:
    """How far an engine's log-probs are from the trainer's, on average.

    Raises:
        PolicyMismatch: further than the bound, or it is not the same number of them.
    """
    kind = number_format(config)
    bound = config.weight_sync.served_policy_bound or BOUNDS.get(kind, BOUNDS["quantised"])
    if len(found) != len(expected):
        raise PolicyMismatch(f"{engine}: {len(found)} log-probs of a prompt, wanted {len(expected)}")
    gap = _mean([abs(a - b) for a, b in zip(found, expected, strict=True)])
    if gap <= bound:  # not so for NaN either
        return gap
    origin = "--served-policy-bound" if config.weight_sync.served_policy_bound else kind
    raise PolicyMismatch(
        f"{engine} ({config.engines.rollout_engine}) does not serve the policy of the "
        f"{trainer_of(config.trainer).name} trainer: on a prompt of {len(expected) + 1} tokens their "
        f"log-probs are {gap:.2g} apart on average, wanted at most {bound:g} ({origin}); the mean is "
        f"{_mean(expected):.4f} in the trainer, {_mean(found):.4f} in the engine. Look at what one of them "
        f"reads otherwise in config.json of {config.engines.synced_checkpoint} (model_type "
        f"{_model_type(config)}: rope, tied embeddings, dense layers, windows, quantization), at "
        "--sglang-dtype and --sglang-quantization, and at the engine's log for weights that it did not find "
        "(--no-check-served-policy goes on without)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _model_type(config: FleetConfig) -> object:
    return HfConfig.read(config.engines.synced_checkpoint).get("model_type")
