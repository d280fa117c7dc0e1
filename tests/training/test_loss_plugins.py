"""Losses of users get log-probs and values by the calls that the original takes."""

import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
from tests.training.test_losses import _args, _brute_force, _logits, _micro_batch

LENGTHS = ("unconcat_tokens", "total_lengths", "response_lengths")


def _parts():
    _, batch = _micro_batch()
    return batch, {key: batch[key] for key in LENGTHS}


def test_log_probs_and_entropies_come_as_a_pair_or_by_name():
    batch, lengths = _parts()
    args = _args(rollout_temperature=0.7)
    logits = _logits(batch)
    found = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
    nothing, results = found
    assert nothing.numel() == 0 and found[1] is results and found["entropy"] is results["entropy"]
    for name, expected in zip(("log_probs", "entropy"), _brute_force(batch, logits, 0.7), strict=True):
        for mine, wanted in zip(found[name], expected, strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
    assert set(get_log_probs_and_entropy(logits, args=args, **lengths)[1]) == {"log_probs"}


def test_both_are_differentiated():
    batch, lengths = _parts()
    logits = _logits(batch).double().requires_grad_()
    results = get_log_probs_and_entropy(logits, args=_args(), with_entropy=True, **lengths)
    expected = dict(zip(("log_probs", "entropy"), _brute_force(batch, logits), strict=True))
    for name, wanted in expected.items():
        mine, other = (
            torch.autograd.grad(torch.cat([*values]).sum(), logits, retain_graph=True)[0]
            for values in (results[name], wanted)
        )
        assert other.any()
        torch.testing.assert_close(mine, other)


def test_values_are_those_before_each_response_token():
    batch, lengths = _parts()
    outputs = torch.randn(1, batch["tokens"].size(1), 1)
    values = get_values(outputs, args=_args(rollout_temperature=0.5), **lengths)["values"]
    start = 0
    for total, response, mine in zip(batch["total_lengths"], batch["response_lengths"], values, strict=True):
        end = start + total - 1
        torch.testing.assert_close(mine, outputs[0, end - response : end, 0])
        start += total
