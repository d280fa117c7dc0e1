"""No sequence of a packed row sees another one, in any architecture."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from slime.training.inputs import PackedInputs
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
from tests.backends.fsdp_utils.architectures import ARCHITECTURES, load, model_args, packed_row, rows
from tests.megatron_harness import run_ranks

PADDED = {"Gemma2", "Bloom", "Mamba"}
"""Logits capped in attention, positions by distance only, a recurrence: such rows cannot stay packed."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_are_those_of_each_sequence_alone(architecture, computed):
    path, results = computed(architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=row[None]).logits[0] for row in rows()])
    for result in results:
        assert result["packed"] is (architecture not in PADDED)
        torch.testing.assert_close(result["logits"][0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_so_are_those_of_two_ranks_that_share_sequences(architecture, computed):
    """With windows of 4 tokens too (Mistral); what cannot stay packed is refused."""
    path, results = computed(architecture)
    if architecture in PADDED:
        for result in results:
            assert result["in_parts"]["refused"].startswith("--context-parallel-size 2: not with ")
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        parts = [F.pad(one, (0, -len(one) % 4))[None] for one in rows()]
        wanted = torch.cat([model(input_ids=part).logits[0] for part in parts])
    found = torch.empty_like(wanted)
    for result in results:
        assert len(result["in_parts"]["rows"]) == len(wanted) // 2
        found[result["in_parts"]["rows"]] = result["in_parts"]["logits"]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def _logits(rank, path, implementation):
    from slime.backends.fsdp_utils.forward import PackedForward

    model = load(model_args(path))
    forward = PackedForward(model, implementation, torch.device("cpu"))
    forward.choose()
    with torch.no_grad():
        return {"logits": forward(packed_row()).clone(), "packed": forward.way == "packed"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_implementations_pad(implementation, computed):
    path, results = computed("Qwen3")
    (padded,) = run_ranks(_logits, 1, path, implementation)
    assert not padded["packed"]
    torch.testing.assert_close(padded["logits"], results[0]["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[1], [3, 3], [4, 1, 9, 8, 2], [2, 0, 5]])
def test_padding_and_back_is_the_identity(lengths):
    sequences = [SequenceInputs(torch.ones(length, dtype=torch.long)) for length in lengths]
    layout = PackedInputs.of(sequences, ParallelContext()).layout
    values = torch.randn(sum(lengths), 3)
    joined = torch.cat([group.gather(values).flatten(0, 1) for group in layout.groups])
    assert torch.equal(joined if layout.order is None else joined[layout.order], values)
    group, order = layout.one_group
    assert group.segments == sum(length > 0 for length in lengths)
    assert torch.equal(group.gather(values).flatten(0, 1)[order], values)
    assert layout.positions.tolist() == [[i for length in lengths for i in range(length)]]
    assert layout.longest == max(lengths) and layout.varlen.queries[-1] == sum(lengths)
