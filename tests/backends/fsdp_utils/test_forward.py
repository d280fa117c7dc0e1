"""No sequence of a packed row sees another one, in any architecture."""

import pytest
import torch
import transformers

from slime.backends.fsdp_utils.segments import Segments
from tests.backends.fsdp_utils.architectures import ARCHITECTURES, load, model_args, save
from tests.megatron_harness import run_ranks

PADDED = {"Gemma2", "Bloom", "Mamba"}
"""Logits capped in attention, positions by distance only, a recurrence: such rows cannot stay packed."""
LENGTHS = [5, 11, 2, 7]


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(96, (length,), generator=generator) for length in LENGTHS]


def _logits(rank, path, implementation):
    from slime.backends.fsdp_utils.forward import PackedForward

    model = load(model_args(path))
    forward = PackedForward(model, implementation, torch.float32)
    forward.choose()
    batch = {"tokens": torch.cat(rows())[None], "segment_lengths": LENGTHS}
    with torch.no_grad():
        return {"logits": forward(batch).clone(), "packed": forward.packed}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_are_those_of_each_sequence_alone(architecture, tmp_path):
    path = save(tmp_path, architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=row[None]).logits[0] for row in rows()])
    results = run_ranks(_logits, 2, path, "flash_attention_2")
    for result in results:
        assert result["packed"] is (architecture not in PADDED)
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
