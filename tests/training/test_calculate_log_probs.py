"""`calculate_log_probs_and_entropy`, which plug-ins call, against a plain softmax in float64."""

import pytest
import torch

from slime.utils.ppo_utils import calculate_log_probs_and_entropy

ROWS, WIDTH = 6, 9


def inputs():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, WIDTH, generator=generator)
    return logits.requires_grad_(), torch.randint(WIDTH, (ROWS,), generator=generator), generator


def reference(logits, tokens, keep):
    p = logits.log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    if keep is not None:
        own = torch.nn.functional.one_hot(tokens, WIDTH).bool()
        p = logits.masked_fill(~(keep | own), -float("inf")).log_softmax(-1)
    return p.gather(1, tokens[:, None]), entropy


@pytest.mark.parametrize("chunk_size", [-1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_it_is_the_softmax_within_the_mask(chunk_size, masked, entropy_grad):
    logits, tokens, generator = inputs()
    keep = torch.rand(ROWS, WIDTH, generator=generator) < 0.4 if masked else None
    call = dict(with_entropy=True, chunk_size=chunk_size, log_prob_keep_mask=keep)
    found = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy_grad=entropy_grad, **call)
    exact = logits.detach().double().requires_grad_()
    wanted = reference(exact, tokens, keep)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
    (found[0] * 2).sum().backward()
    (wanted[0] * 2).sum().backward(retain_graph=True)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    if entropy_grad:
        logits.grad = exact.grad = None
        again = calculate_log_probs_and_entropy(logits, tokens, None, **call)[1]
        again.sum().backward()
        reference(exact, tokens, keep)[1].sum().backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_entropies_come_only_if_they_are_asked_for():
    logits, tokens, _ = inputs()
    log_probs, entropy = calculate_log_probs_and_entropy(logits, tokens)
    assert log_probs.shape == (ROWS, 1) and entropy is None
    none = calculate_log_probs_and_entropy(logits[:0], tokens[:0], None, with_entropy=True)
    assert none[0].shape == none[1].shape == (0,)
