"""No sequence of a packed row sees another one, in any architecture."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from slime.backends.fsdp_utils.segments import Segments
from tests.backends.fsdp_harness import fsdp_args
from tests.megatron_harness import run_ranks

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
# Name of the family: its config, and whether rows can stay packed.
FAMILIES = {
    "Qwen3": ({**SMALL, **HEADS}, True),
    "GPTNeoX": ({**SMALL, "num_attention_heads": 4, "max_position_embeddings": 64}, True),
    "GPT2": ({"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, True),
    "Gemma": ({**SMALL, **HEADS}, True),
    "Mistral": ({**SMALL, **HEADS, "sliding_window": 4}, True),
    "Gemma2": ({**SMALL, **HEADS, "sliding_window": 4, "attn_logit_softcapping": 5.0}, False),
    "Qwen3Moe": (
        {**SMALL, **HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        True,
    ),
    "Bloom": ({"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}, False),
    "Mamba": ({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, False),
}
LENGTHS = [5, 11, 2, 7]


def save(path, family, **overrides):
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family][0], **overrides})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 and "norm" not in name:
                param.mul_(4)
    model.save_pretrained(path)
    return str(path)


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(96, (length,), generator=generator) for length in LENGTHS]


def _logits(rank, path, implementation):
    from slime.backends.fsdp_utils.forward import PackedForward
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.model import build_model

    args = fsdp_args_of(path)
    mesh, _ = init(args)
    model = build_model(args, mesh)
    load_hf_weights(args, model, path)
    forward = PackedForward(model, implementation, torch.float32)
    forward.choose()
    batch = {"tokens": torch.cat(rows())[None], "segment_lengths": LENGTHS}
    with torch.no_grad():
        return {"logits": forward(batch).clone(), "packed": forward.packed}


def fsdp_args_of(path):
    """Of any architecture: only what the trainer's model reads."""
    return SimpleNamespace(
        **{"hf_checkpoint": path, "trust_remote_code": False, "gradient_checkpointing": False},
        **{"fsdp_cpu_offload": False, "params_dtype": torch.float32, "seed": 1},
        **{"only_train_params_name_list": None, "freeze_params_name_list": None},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_those_of_each_sequence_alone(family, tmp_path):
    path = save(tmp_path, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=row[None]).logits[0] for row in rows()])
    results = run_ranks(_logits, 2, path, "flash_attention_2")
    for result in results:
        assert result["packed"] is FAMILIES[family][1]
        torch.testing.assert_close(result["logits"][0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_implementations_pad(implementation, tmp_path):
    path = save(tmp_path, "Qwen3")
    (packed,) = run_ranks(_logits, 1, path, "flash_attention_2")
    (padded,) = run_ranks(_logits, 1, path, implementation)
    assert packed["packed"] and not padded["packed"]
    torch.testing.assert_close(padded["logits"], packed["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[1], [3, 3], [4, 1, 9, 8, 2], [2, 0, 5]])
def test_padding_and_back_is_the_identity(lengths):
    segments = Segments(lengths, torch.device("cpu"))
    values = torch.randn(sum(lengths), 3)
    assert torch.equal(segments.packed([group.gather(values) for group in segments.groups]), values)
    assert torch.equal(segments.packed_whole(segments.whole.gather(values)), values)
    assert segments.positions.tolist() == [i for length in lengths for i in range(length)]
    assert segments.longest == max(lengths) and segments.boundaries[-1] == sum(lengths)


def test_the_harness_has_the_flags(tmp_path):
    assert vars(fsdp_args_of("path")).keys() - {"params_dtype"} <= {*vars(fsdp_args(save(tmp_path, "Qwen3")))}
