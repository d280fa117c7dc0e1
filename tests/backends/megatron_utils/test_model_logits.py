"""The Megatron model computes what ``transformers`` computes from the same checkpoint."""

import pytest
import torch
import torch.distributed as dist

from slime.config.run import run_config
from tests.megatron_harness import MODEL_TYPES, make_args, run_ranks, tiny_hf_model

# Two equal, one close to them, one far longer, one of a single token; 64 tokens in all.
LENGTHS = [9, 30, 1, 9, 15]

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def _segments(vocab_size=256):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def _packed_params(lengths, device="cpu"):
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def _build(args):
    from slime.backends.megatron_utils.hf_weights import load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    return model[0]


@torch.no_grad()
def _packed_logits(rank, args, tokens):
    from megatron.core import parallel_state as mpu

    model = _build(args)
    hidden_shape = (tokens.numel(), 1, args.hidden_size)
    if not mpu.is_pipeline_first_stage():
        hidden = torch.empty(hidden_shape)
        dist.recv(hidden, src=rank - 1)
        model.set_input_tensor(hidden)
    out = model(tokens[None], None, None, packed_seq_params=_packed_params(LENGTHS, tokens.device))
    if not mpu.is_pipeline_last_stage():
        dist.send(out, dst=rank + 1)
        return None
    parts = [torch.empty_like(out) for _ in range(args.tensor_model_parallel_size)]
    dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[0, :, : args.vocab_size]


def _hf_logits(model, segments):
    with torch.no_grad():
        return torch.cat([model(segment[None]).logits[0] for segment in segments])


def _check(tmp_path, layout, model):
    model.save_pretrained(tmp_path)
    segments = _segments()
    args = make_args(tmp_path, **LAYOUTS[layout])
    results = run_ranks(_packed_logits, 1 if layout == "tp1" else 2, args, torch.cat(segments))
    expected = _hf_logits(model, segments)
    for logits in results[-1:] if layout == "pp2" else results:
        # The smallest gap that packing, RoPE or a wrong head order could leave is far above this.
        assert (logits - expected).abs().max() < 1e-4
    assert expected.abs().max() > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_equal_those_of_transformers(tmp_path, model_type, layout):
    _check(tmp_path, layout, tiny_hf_model(model_type))


@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_logits_with_tied_and_untied_embeddings(tmp_path, layout):
    _check(tmp_path / "untied", layout, tiny_hf_model("qwen3", tie_word_embeddings=False))
    _check(tmp_path / "tied", layout, tiny_hf_model("llama", tie_word_embeddings=True))


def test_logits_with_llama3_rope_scaling(tmp_path):
    rope = {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    _check(tmp_path, "tp1", tiny_hf_model("llama", rope_parameters=rope, max_position_embeddings=131072))


@torch.no_grad()
def _batch_logits(rank, args, tokens):
    return _build(args)(tokens, None, None)


def test_unpacked_batches_give_the_same_logits(tmp_path):
    model = tiny_hf_model("qwen3")
    model.save_pretrained(tmp_path)
    tokens = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
    (logits,) = run_ranks(_batch_logits, 1, make_args(tmp_path), tokens)
    with torch.no_grad():
        assert (logits - model(tokens).logits).abs().max() < 1e-4


def _gradients(rank, args, tokens):
    model = _build(args)
    logits = model(tokens[None], None, None, packed_seq_params=_packed_params(LENGTHS))
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return model.embedding.word_embeddings.weight.grad


def test_gradients_through_packed_attention_equal_those_of_transformers(tmp_path):
    model = tiny_hf_model("qwen3")
    model.save_pretrained(tmp_path)
    segments = _segments()
    (gradient,) = run_ranks(_gradients, 1, make_args(tmp_path), torch.cat(segments))
    sum(model(segment[None]).logits.log_softmax(-1)[..., 3].sum() for segment in segments).backward()
    expected = model.model.embed_tokens.weight.grad
    assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max()
