"""Checkpoints are converted parameter by parameter: the same bits, in a fraction of the memory."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.arguments.model_only import model_args
from tests.families import tiny_family
from tests.megatron_harness import run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one process": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}


def _there_and_back(rank, args, root, max_bytes):
    """Saves and loads, as two commands after one another would."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.convert import write_hf, write_torch_dist

    saved = write_torch_dist(args, root / "saved")
    parallel_state.destroy_model_parallel()
    write_hf(args, saved, root / "out", max_bytes)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_moe", "one process"),
        ("gemma3_text", "one process"),
        ("deepseek_v3", "one process"),
        ("deepseek_v3", "tp2"),
        ("gemma3_text", "pp2"),
    ],
)
def test_there_and_back_is_the_same_to_the_last_bit(family, layout, tmp_path):
    tiny_family(family, tmp_path / "source")
    world, words = LAYOUTS[layout]
    args = model_args(["--hf-checkpoint", str(tmp_path / "source"), "--fp32", *words], world)
    run_ranks(_there_and_back, world, args, tmp_path, 100_000)
    expected = load_file(tmp_path / "source" / "model.safetensors")  # untrained ones are carried over
    found = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


MAX_BYTES = 8 * 2**20
CONFIG = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"},
    **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 12},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "norm_topk_prob": True},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu"},
}


def sparse_checkpoint(path: Path) -> int:
    """A model of zeros that takes no room on the disk; returns its bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    header, end = {}, 0
    for name, shape in shapes().items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def shapes() -> dict[str, list[int]]:
    hidden, width, head = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer = {
        **{"input_layernorm": [hidden], "post_attention_layernorm": [hidden]},
        **{"self_attn.q_proj": [queries, hidden], "self_attn.o_proj": [hidden, queries]},
        **{f"self_attn.{part}_proj": [keys, hidden] for part in "kv"},
        **{f"self_attn.{part}_norm": [head] for part in "qk"},
        "mlp.gate": [CONFIG["num_experts"], hidden],
    }
    for expert in range(CONFIG["num_experts"]):
        layer |= {f"mlp.experts.{expert}.{part}_proj": [width, hidden] for part in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj"] = [hidden, width]
    found = {f"{name}.weight": [CONFIG["vocab_size"], hidden] for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = [hidden]
    for number in range(CONFIG["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def _peak(rank, args, small, root):
    """Bytes that a conversion there and back adds to the memory of a process, at most."""
    from slime.backends.megatron_utils import streaming

    streaming._FILE_BYTES = MAX_BYTES
    _there_and_back(rank, small, root / "warm", MAX_BYTES)  # imports what is imported late
    before = _peak_memory()
    _there_and_back(rank, args, root, MAX_BYTES)
    return _peak_memory() - before


def _peak_memory():
    """Bytes, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_conversion_takes_a_fraction_of_the_models_memory(tmp_path):
    size = sparse_checkpoint(tmp_path / "source")
    tiny_family("mixtral", tmp_path / "tiny")
    args, small = (model_args(["--hf-checkpoint", str(tmp_path / of)], 1) for of in ("source", "tiny"))
    (peak,) = run_ranks(_peak, 1, args, small, tmp_path)
    assert size > 300e6
    assert peak < 0.5 * size, (peak, size)
