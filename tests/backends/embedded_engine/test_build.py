"""What an engine's flags make of its limits."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine import build
from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.model_config import ModelConfig
from tests.families import tiny_family

BYTES_PER_TOKEN = 2 * 2 * 3 * 5 * 4
CONTEXT = 100


def limits(**flags):
    """Returns those of a model with two layers and three heads of width 5 for keys, in float32."""
    shape = SimpleNamespace(num_layers=2, num_query_groups=3, kv_channels=5)
    config = SimpleNamespace(shape=shape, dtype=torch.float32, device=torch.device("cpu"))
    return build._limits(EmbeddedServerArgs(model_path="m", **flags), config, CONTEXT)


def test_flags_bound_rows_tokens_and_chunks():
    assert limits(max_total_tokens=7) == Limits(rows=256, tokens=7, chunk=1024, context=CONTEXT)
    flags = {"max_total_tokens": 7, "max_running_requests": 3}
    assert limits(**flags, chunked_prefill_size=-1) == Limits(
        rows=3, tokens=7, chunk=CONTEXT, context=CONTEXT
    )
    assert limits(**flags, chunked_prefill_size=1).chunk == 1


@pytest.mark.parametrize(("tokens_that_fit", "found"), [(90, 90), (10_000, 400)])
def test_the_cache_takes_three_tenths_of_the_memory_and_no_more_than_it_needs(
    monkeypatch, tokens_that_fit, found
):
    free = tokens_that_fit * BYTES_PER_TOKEN / 0.3 + 1
    monkeypatch.setattr(build, "free_memory", lambda device: free)
    assert limits(max_running_requests=4).tokens == found


@pytest.mark.parametrize("family", ["qwen3_next", "glm4"])
def test_linear_attention_wants_a_transformers_that_knows_our_states(family, tmp_path, monkeypatch):
    tiny_family(family, tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    given = Limits(rows=2, tokens=32, chunk=16, context=16)
    build.build_executor(tmp_path, config, given)
    monkeypatch.delattr(transformers.Cache, "is_recording_past")
    if family == "glm4":
        build.build_executor(tmp_path, config, given)
        return
    with pytest.raises(ValueError, match=r"linear attention: .*wanted: transformers>=5\.21, or SGLang"):
        build.build_executor(tmp_path, config, given)
