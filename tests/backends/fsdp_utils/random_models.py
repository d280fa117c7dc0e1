"""Random configurations of architectures that ``transformers`` knows, with tiny random models."""

import copy
import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slime.backends.fsdp_utils.forward import PackedForward
from slime.backends.fsdp_utils.small_config import VARIANTS, small_config
from slime.models import FAMILIES
from slime.training.inputs import PackedInputs
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
from tests.families import ALL, tiny_config

TOLERANCE = 1e-4
_ATTEMPTS = 6
_LENGTHS = (
    *("sliding_window", "sliding_window_size", "attention_chunk_size", "floor_scale", "keep_window_size"),
    *("window_size", "local_attention", "attention_window_size"),
)
_SWITCHES = (
    *("attention_bias", "mlp_bias", "use_qk_norm", "qk_layernorm", "norm_topk_prob", "use_sliding_window"),
    *("attn_temperature_tuning", "tie_word_embeddings", "use_parallel_residual", "parallel_attn"),
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx")
_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ORIGINAL = 24
LENGTHS = (57, 44, 3, 31, 1, 18)
"""Rows beyond every window and original context that is drawn, and within."""


class NoModel(ValueError):
    """``transformers`` does not build it out of what was drawn."""


def random_model(name: str, seed: int) -> PreTrainedModel:
    """Makes a model of a row of `tests.families` or of ``transformers``, its attention far from uniform.

    Raises:
        NoModel: nothing that was drawn can be built.
    """
    rng, error = random.Random(f"{name} {seed}"), None
    for attempt in range(_ATTEMPTS):
        try:
            return built(_drawn(name, rng, changed=attempt < _ATTEMPTS - 1))
        except Exception as failure:  # whatever an architecture has against a config
            error = failure
    raise NoModel(f"{name}: {error}") from error


def _drawn(name: str, rng: random.Random, changed: bool) -> PretrainedConfig:
    """The default config of an architecture, made small, a few things in it ``changed``."""
    config = _small(name)
    values = config.to_dict()
    for context in _CONTEXTS:
        if isinstance(values.get(context), int):
            values[context] = 64
    if changed:
        _change(values, rng)
    return type(config).from_dict(values)


def _small(name: str) -> PretrainedConfig:
    """Returns a config with few layers, heads and experts, so that it can be built at all."""
    if name in ALL:
        return tiny_config(name).get_text_config()
    config = CONFIG_MAPPING[name]()
    for variant in range(VARIANTS):
        try:
            small = small_config(config, variant).config
            with torch.device("meta"):
                model = MODEL_FOR_CAUSAL_LM_MAPPING[type(small)]._from_config(small)
        except Exception:
            continue
        if sum(param.numel() for param in model.parameters()) < 60_000_000:
            return small
    raise ValueError("no small config")


def _change(values: dict[str, Any], rng: random.Random) -> None:
    for name in _LENGTHS:
        if name in values and rng.random() < 0.8:
            values[name] = rng.randint(4, 40)
    for name in _SWITCHES:
        if isinstance(values.get(name), bool) and rng.random() < 0.4:
            values[name] = not values[name]
    for name in _CAPS:
        if name in values and rng.random() < 0.5:
            values[name] = rng.choice([None, 3.0])
    if values.get("use_sliding_window", True) and values.get("sliding_window"):
        _change_layers(values, rng)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and rng.random() < 0.7:
        values["rope_parameters"] = {**rope, **_rope(values, rng.choice(_ROPES))}
    if isinstance(values.get("num_key_value_heads"), int) and rng.random() < 0.3:
        values["num_key_value_heads"] = 1


def _change_layers(values: dict[str, Any], rng: random.Random) -> None:
    kinds = {"full_attention", "sliding_attention"}
    layers = values.get("layer_types")
    if layers and set(layers) <= kinds:
        values["layer_types"] = [rng.choice(sorted(kinds)) for _ in layers]
    if isinstance(values.get("max_window_layers"), int):
        values["max_window_layers"] = rng.randint(0, 1)


def _rope(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Parameters of a rotary embedding that is scaled beyond an original context."""
    heads = values.get("num_attention_heads") or 1
    width = values.get("qk_rope_head_dim") or values.get("head_dim") or values["hidden_size"] // heads
    share = (values.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    pairs = int(width * share) // 2
    original = {"original_max_position_embeddings": ORIGINAL}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * pairs, "long_factor": [3.0] * pairs}
        return {"rope_type": kind, "factor": 2.0, **factors, **original}
    own = {
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "yarn": {"factor": 4.0, **original},
    }
    if kind == "dynamic":
        values["max_position_embeddings"] = ORIGINAL
    return {"rope_type": kind, "factor": 2.0, **own.get(kind, {})}


def built(config: PretrainedConfig) -> PreTrainedModel:
    """A random model."""
    torch.manual_seed(7)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3) if param.dim() > 1 else param.add_(torch.randn_like(param) * 0.05)
    if not bool(torch.cat([x.flatten() for x in each_alone(model, rows_of(model)[:1])]).isfinite().all()):
        raise ValueError("logits that are not finite")
    return model


def rows_of(model: PreTrainedModel, seed: int = 3) -> list[torch.Tensor]:
    """Sequences of many lengths; as long as the model has positions."""
    config = model.config.get_text_config()
    longest = min([v for name in _CONTEXTS if isinstance(v := getattr(config, name, None), int)] or [64])
    learned = not getattr(config, "rope_parameters", None)
    generator = torch.Generator().manual_seed(seed)
    lengths = [min(length, longest) if learned else length for length in LENGTHS]
    return [torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def each_alone(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """What ``transformers`` computes of each sequence, by a model that has seen none before."""
    return [copy.deepcopy(model)(input_ids=row[None], use_cache=False).logits[0] for row in rows]


def compared(model: PreTrainedModel, implementation: str = "flash_attention_2") -> dict[str, Any]:
    """What FSDP makes of a batch of rows, or how it is ``refused``.

    The ``way`` and ``why``, and the largest ``difference`` from ``transformers`` in standard deviations of
    the logits. Where that is large there is also the ``rounding``: how far these are from float64.
    """
    rows = rows_of(model)
    wanted = torch.cat(each_alone(model, rows))
    forward = PackedForward(model, implementation, torch.device("cpu"))
    try:
        outcome = forward.choose()
    except ValueError as error:
        return {"refused": str(error)}
    batch = PackedInputs.of([*map(SequenceInputs, rows)], ParallelContext())
    with torch.no_grad():
        found = {"way": forward.way, "why": outcome.why, "difference": _gap(forward(batch)[0], wanted)}
    if not found["difference"] < TOLERANCE:
        model.set_attn_implementation("eager")
        found["rounding"] = _gap(wanted, torch.cat(each_alone(model.double(), rows)))
    return found


def agrees(found: Mapping[str, Any]) -> bool:
    """Whether logits are those of ``transformers``, as far as float32 has them."""
    return bool(found["difference"] < max(TOLERANCE, found.get("rounding", 0.0)))


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.std())


def others() -> list[str]:
    """Every architecture with a causal language model that no family here is of."""
    known = (name for name, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING)
    return sorted(name for name in known if name not in FAMILIES)
