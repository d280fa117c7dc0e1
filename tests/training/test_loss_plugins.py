"""Losses of users get log-probs and values by the calls that the original takes."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
from slime.training.context_parallel import RowSplit
from slime.training.parallel import ParallelContext
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


def test_a_rank_s_part_is_that_of_the_mpu_which_the_module_holds_now(monkeypatch):
    nuclei = [[1, 2, 5, 0, 7, 7], [3, 4]], [[0, 2, 4, 6], [0, 1, 2]]
    lengths = [8, 5], [3, 2]

    def keep(rows):
        return loss._build_topp_keep_mask(rows, 8, torch.device("cpu"), *nuclei, *lengths)

    whole = keep(16)
    assert not whole.all()
    for rank in range(2):
        layout = SimpleNamespace(
            get_context_parallel_world_size=lambda: 2, get_context_parallel_rank=lambda rank=rank: rank
        )
        monkeypatch.setattr(loss, "mpu", layout)
        # Each sequence is padded to a multiple of four chunks: the second one to 8.
        padded = torch.cat([whole[:13], torch.ones(3, 8, dtype=torch.bool)])
        mine = RowSplit.of([8, 8], ParallelContext(cp_size=2, cp_rank=rank)).rows
        assert torch.equal(keep(8), padded[mine])


@pytest.fixture
def captures():
    loss.enable_log_prob_capture()
    yield
    loss.enable_log_prob_capture(False)


def test_log_probs_of_training_are_captured_until_they_are_drained(captures):
    _, batch = _micro_batch(keys=("rollout_log_probs",))
    batch["advantages"] = [torch.ones(length) for length in batch["response_lengths"]]
    logits = _logits(batch).requires_grad_()
    wanted, _ = _brute_force(batch, logits.detach(), 0.7)
    args = _args(rollout_temperature=0.7)
    for function in (loss.policy_loss_function, loss.sft_loss_function):
        for again in (False, True):
            recomputed(function, args, batch, logits) if again else function(args, batch, logits, torch.sum)
            found = loss.drain_captured_log_probs()
            assert not any(values.requires_grad for values in found)
            for mine, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert loss.drain_captured_log_probs() == []
    with torch.no_grad():  # a pass, not training
        loss.policy_loss_function(args, batch, logits, torch.sum)
    assert loss.drain_captured_log_probs() == []
    loss.policy_loss_function(args, batch, logits, torch.sum)
    loss.enable_log_prob_capture(False)
    loss.policy_loss_function(args, batch, logits, torch.sum)
    assert loss.drain_captured_log_probs() == []


def recomputed(function, args, batch, logits):
    """The loss and its gradient, with its graph made again for the latter."""
    found = checkpoint(lambda logits: function(args, batch, logits, torch.sum)[0], logits, use_reentrant=True)
    found.backward()
