"""Log-probs and entropies against float64, and the memory they keep."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy
from tests.megatron_harness import run_ranks

VOCAB, WIDTH, ROWS = 45, 64, 7
USED = torch.tensor([1, 2, 5, 0])
TARGETS = torch.tensor([3, 31, 32, 44])
# How much each log-prob and entropy weighs in the loss.
WEIGHTS = torch.tensor([[0.5, -1.0, 2.0, 1.5], [1.0, 0.3, -0.7, 0.0]], dtype=torch.double)
Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _logits(scale: float = 3.0) -> torch.Tensor:
    logits = scale * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[:, VOCAB:] += 20  # padding rows of the vocabulary, which must not matter
    return logits


def _expected(logits: torch.Tensor, temperature: float, entropy_gradient: bool) -> Values:
    """Log-probs, entropies and the gradient by autograd in float64, row by row."""
    x = logits.double().requires_grad_()
    log_probs, entropies = [], []
    for row, target in zip(USED.tolist(), TARGETS.tolist(), strict=True):
        p = torch.softmax(x[row, :VOCAB] / temperature, -1)
        log_probs.append(p[target].log())
        entropies.append(-(p * p.log()).sum())
    found = torch.stack(log_probs), torch.stack(entropies)
    (WEIGHTS[0] @ found[0] + entropy_gradient * WEIGHTS[1] @ found[1]).backward()
    assert x.grad is not None
    return found[0].detach(), found[1].detach(), x.grad


def _found(logits: torch.Tensor, group: Any, temperature: float, entropy: bool, chunk: int) -> Values:
    x = logits.clone().requires_grad_()
    options = dict(rows=USED, temperature=temperature, vocab_size=VOCAB, chunk_size=chunk)
    values = vocab_parallel_log_prob_entropy(x, TARGETS, group, entropy_gradient=entropy, **options)
    loss = WEIGHTS[0].to(values[0].dtype) @ values[0]
    if entropy:
        loss = loss + WEIGHTS[1].to(values[1].dtype) @ values[1]
    loss.backward()
    assert x.grad is not None
    return values[0].detach(), values[1].detach(), x.grad


CASES = [(1.0, False, 0), (0.7, True, 0), (1.3, True, 3), (1.0, True, 1)]


@pytest.mark.parametrize(("temperature", "entropy", "chunk"), CASES)
def test_values_and_gradients_are_those_of_float64(temperature: float, entropy: bool, chunk: int) -> None:
    found = _found(_logits(), None, temperature, entropy, chunk)
    for mine, wanted in zip(found, _expected(_logits(), temperature, entropy), strict=True):
        torch.testing.assert_close(mine.double(), wanted, atol=1e-5, rtol=0)


def test_the_gradient_has_the_dtype_of_the_logits_and_float32_precision_within() -> None:
    logits = _logits().bfloat16()
    log_probs, entropies, gradient = _found(logits, None, 0.7, True, 0)
    wanted = _expected(logits, 0.7, True)
    torch.testing.assert_close(log_probs.double(), wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), wanted[1], atol=1e-5, rtol=0)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), wanted[2], atol=1e-5, rtol=2**-8)


def _on_rank(rank: int, parts: int) -> list[Values]:
    dist.init_process_group("gloo", rank=rank, world_size=parts)
    logits = _logits().chunk(parts, -1)[rank]
    return [_found(logits, dist.group.WORLD, *case) for case in CASES]


@pytest.mark.parametrize("parts", [2, 4])
def test_a_vocabulary_may_be_split_even_into_slices_of_padding_alone(parts: int) -> None:
    """The last of four slices has no token at all."""
    ranks = run_ranks(_on_rank, parts, parts)
    for i, (temperature, entropy, _) in enumerate(CASES):
        wanted = _expected(_logits(), temperature, entropy)
        for log_probs, entropies, _ in (rank[i] for rank in ranks):
            torch.testing.assert_close(log_probs.double(), wanted[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(entropies.double(), wanted[1], atol=1e-5, rtol=0)
        gradient = torch.cat([rank[i][2] for rank in ranks], -1)
        torch.testing.assert_close(gradient.double(), wanted[2], atol=1e-5, rtol=0)


def test_nothing_of_the_size_of_the_logits_is_kept_but_themselves() -> None:
    logits = _logits().requires_grad_()
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        vocab_parallel_log_prob_entropy(logits, TARGETS, None, entropy_gradient=True, rows=USED)
    assert kept.pop(logits.data_ptr()) == logits.numel()
    assert max(kept.values()) == len(USED)


def test_no_rows_still_reach_the_logits() -> None:
    logits, none = _logits().requires_grad_(), torch.empty(0, dtype=torch.int64)
    log_probs, entropies = vocab_parallel_log_prob_entropy(
        logits, none, None, entropy_gradient=True, rows=none
    )
    (log_probs.sum() + entropies.sum()).backward()
    assert logits.grad is not None and not logits.grad.any()
