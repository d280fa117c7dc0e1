"""No family leaves out an attribute of config.json that changes what ``transformers`` computes."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from slime.models import FAMILIES, HfConfigError
from slime.models.hf_config import HfConfig
from slime.models.shape import trained_shape
from tests.each import hold_each
from tests.families import ALL, WITH_IMAGES, model_type, stir, tiny_config

pytestmark = pytest.mark.slow

# What some architectures have, tried with all of them.
_MORE = {
    **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0, "sliding_window": 4},
    **{"use_sliding_window": True, "attention_bias": True, "mlp_bias": True, "logit_scale": 2.0},
    **{"embedding_multiplier": 2.0, "residual_multiplier": 2.0, "attention_multiplier": 0.3},
    **{"logits_scaling": 2.0, "query_pre_attn_scalar": 7, "scoring_func": "softmax"},
    **{"attention_chunk_size": 4, "use_bidirectional_attention": True, "hidden_act": "gelu"},
}
_NOT_OF_THE_MODEL = {
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
    ),
    *("transformers_version", "id2label", "label2id", "pad_token_id", "bos_token_id", "eos_token_id"),
}
_ORIGINAL = {"original_max_position_embeddings": 8, "factor": 4.0}
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 777.0},
    {"partial_rotary_factor": 0.25},
    {"attention_factor": 1.7},
    {"beta_fast": 5.0, "beta_slow": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "max_position_embeddings": 4},
    {"rope_type": "yarn", **_ORIGINAL},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL},
]


def _other(value: Any) -> list[Any]:
    """Values that an attribute may have in the place of one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [1.5 * value + 0.1]
        case None:
            return [2, 0.5, True]
        case str():
            return ["sigmoid", "softmax", "greedy", "gelu", "silu"]
    return []


def _changes(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each changes one thing, as far as a class of configs takes it."""
    for name in {**dict.fromkeys(_MORE), **values}:
        if name in _NOT_OF_THE_MODEL:
            continue
        more = [_MORE[name]] if name in _MORE else []
        yield from ({name: other} for other in [*_other(values.get(name)), *more])
    if values.get("layer_types"):
        yield {"layer_types": values["layer_types"][::-1]}
    rope = values.get("rope_parameters") or {}
    kinds = [name for name, value in rope.items() if isinstance(value, dict)]
    for change in _ROPES:
        yield {"rope_parameters": {**rope, **change}}
        yield from ({"rope_parameters": {**rope, kind: {**rope[kind], **change}}} for kind in kinds)


def _shape(values: Mapping[str, Any]) -> str:
    config = HfConfig(values)
    try:
        return repr(trained_shape(FAMILIES[values["model_type"]].shape(config), config.text))
    except HfConfigError as error:
        return f"refused: {error}"


class _Model:
    """A model of a family: what its logits become when its config has another value."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        torch.manual_seed(0)
        model = self._built(config)
        with torch.no_grad():
            stir(model, torch.Generator().manual_seed(1))
        self._weights = model.state_dict()
        self._tokens = torch.randint(config.vocab_size, (1, 14), generator=torch.Generator().manual_seed(2))
        self._wanted = self._logits(model)

    def _built(self, config: PretrainedConfig) -> Any:
        return self._kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()

    @torch.no_grad()
    def _logits(self, model: Any) -> torch.Tensor:
        return model(self._tokens, use_cache=False).logits

    def changes(self, config: PretrainedConfig) -> bool:
        """Whether there are other logits or tensors; False as well where there is no such model."""
        try:
            model = self._built(config)
            state = model.state_dict()
            if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in self._weights.items()}:
                return True
            model.load_state_dict(self._weights)
            return not torch.allclose(self._logits(model), self._wanted, rtol=0, atol=1e-5)
        except Exception:  # whatever an architecture has against the value
            return False


def _hold(families: list[str]) -> None:
    def check(name: str) -> None:
        config = tiny_config(name)
        values = {**config.to_dict(), "model_type": model_type(name)}
        shape, model, told = _shape(values), _Model(config), 0
        for change in _changes(config.to_dict()):
            try:
                other = type(config).from_dict(copy.deepcopy({**config.to_dict(), **change}))
            except Exception:  # its class refuses it
                continue
            if model.changes(other):
                told += 1
                assert _shape({**values, **change}) != shape, f"{change} changes nothing"
        assert told >= 12, told

    hold_each(families, check)


def test_what_changes_the_logits_of_transformers_changes_the_shape_or_is_refused():
    _hold(["qwen3", "gpt_oss"])


@pytest.mark.nightly
def test_so_it_is_in_every_family():
    _hold([name for name in ALL if name not in WITH_IMAGES])
