"""Frequencies of rotary embeddings are those of ``transformers``, for every kind of scaling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime.models import HfConfigError
from slime.models.hf_config import HfConfig
from slime.models.rope import Rope, inverse_frequencies, read_rope

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
        "original_max_position_embeddings": 4096,
    },
    "yarn": YARN,
    "yarn of DeepSeek-V3": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn of Kimi K2": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    # Both ends of the ramp lie beyond the pairs that there are, and one does.
    "yarn without a slow pair": YARN | {"original_max_position_embeddings": 2**40, "beta_fast": 2.0},
    "yarn whose ramp goes on": YARN
    | {"original_max_position_embeddings": 2**26, "beta_slow": 1e-3, "beta_fast": 1e6},
    "yarn whose ramp begins before": YARN | {"original_max_position_embeddings": 64, "beta_fast": 64.0},
    "yarn whose ramp has no length": YARN | {"original_max_position_embeddings": 6},
    "yarn with one of two temperatures": YARN | {"mscale": 0.707},
    "yarn with the other one": YARN | {"mscale_all_dim": 0.707},
    "yarn with a factor of attention": YARN | {"attention_factor": 1.25},
}


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_magnitude_are_those_of_transformers(scaling, width):
    values = {**SCALINGS[scaling], "rope_theta": 50000.0}
    config = LlamaConfig(head_dim=width, rope_parameters=dict(values), max_position_embeddings=163840)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, torch.device("cpu"))
    rope = read_rope(HfConfig({"rope_parameters": values}))
    torch.testing.assert_close(inverse_frequencies(rope, width), frequencies, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


def test_deepseek_multiplies_scores_by_the_square_of_its_temperature():
    rope = read_rope(HfConfig({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}))
    assert rope.score_factor == pytest.approx(1.3688879454113936**2)  # 0.1 ln 40 + 1
    assert read_rope(HfConfig({"rope_scaling": YARN})).score_factor == 1.0


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ({}, {}, Rope(10000.0)),
        ({"rope_theta": 5e5}, {"base": 1e6}, Rope(5e5)),
        ({}, {"base": 1e6, "interleaved": True}, Rope(1e6, interleaved=True)),
        ({"partial_rotary_factor": 0.25}, {"percent": 0.5}, Rope(10000.0, percent=0.25)),
        ({}, {"percent": 0.5}, Rope(10000.0, percent=0.5)),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, {}, Rope(10000.0)),
    ],
)
def test_what_config_json_leaves_out_is_what_the_family_does(values, options, expected):
    assert read_rope(HfConfig(values), **options) == expected


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE factor: missing .RoPE type is linear"),
        ({"rope_scaling": YARN | {"truncate": 0.5}}, "RoPE truncate is 0.5 .wanted: true or false"),
        ({"rope_scaling": YARN | {"beta_fast": "x"}}, "RoPE beta_fast is 'x'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5 \(wanted: 1.0\)"),
    ],
)
def test_what_is_not_computed_is_refused(values, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        read_rope(HfConfig(values))
