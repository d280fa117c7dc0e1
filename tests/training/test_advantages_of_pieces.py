"""Advantages of a rank's pieces, as plug-ins of the original ask for them: those of the whole batch, cut."""

import random
import threading

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cp_utils, loss
from slime.training import parallel
from slime.training.parallel import ParallelContext
from tests.run_args import plugin_args, run_args

CP, DP = 2, 2
TOKEN_VALUES = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")
RESULTS = ("kl", "advantages", "returns")


class Group:
    """Threads that stand for the ranks of a process group."""

    def __init__(self, size):
        self.size, self.given, self.barrier = size, {}, threading.Barrier(size, timeout=20)

    def exchange(self, rank, tensor):
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        everything = [self.given[r] for r in range(self.size)]
        self.barrier.wait()
        return everything


class Ranks:
    """megatron-core's ``mpu`` and torch.distributed, as the thread of each rank sees them."""

    def __init__(self, monkeypatch):
        self.here = threading.local()
        self.cp_groups, self.dp_groups = [Group(CP) for _ in range(DP)], [Group(DP) for _ in range(CP)]
        for name in ("get_rank", "all_reduce", "all_gather_into_tensor"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        for module in (loss, cp_utils):
            monkeypatch.setattr(module, "mpu", self, raising=False)

    def run(self, function):
        found, failed = {}, []

        def run(dp, cp):
            self.here.dp, self.here.cp = dp, cp
            try:
                found[dp, cp] = function(dp, cp)
            except Exception as error:
                failed.append(error)
                [group.barrier.abort() for group in (*self.cp_groups, *self.dp_groups)]

        threads = [threading.Thread(target=run, args=(dp, cp)) for dp in range(DP) for cp in range(CP)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if failed:
            raise failed[0]
        return found

    def get_context_parallel_world_size(self):
        return CP

    def get_context_parallel_rank(self):
        return self.here.cp

    def get_context_parallel_group(self):
        return self.cp_groups[self.here.dp]

    def get_data_parallel_group(self):
        return self.dp_groups[self.here.cp]

    def get_rank(self, group):
        return self.here.cp if group in self.cp_groups else self.here.dp

    def all_reduce(self, tensor, group):
        tensor.copy_(sum(group.exchange(self.get_rank(group), tensor)))

    def all_gather_into_tensor(self, everywhere, tensor, group):
        everywhere.copy_(torch.cat(group.exchange(self.get_rank(group), tensor)))


def random_batch():
    """Ragged responses; two lie with one rank alone, and one is empty."""
    generator, pick = torch.Generator().manual_seed(5), random.Random(5)
    totals, responses = [12, 30, 9, 40, 7, 21], [7, 20, 1, 2, 0, 20]
    batch = {"total_lengths": totals, "response_lengths": responses}
    batch["rewards"] = [pick.gauss(0, 1) for _ in totals]
    batch["loss_masks"] = [torch.tensor([pick.random() < 0.8 for _ in range(n)]).int() for n in responses]
    for name in TOKEN_VALUES:
        batch[name] = [torch.randn(n, generator=generator) for n in responses]
    return batch


def cut(values, batch):
    """The pieces of the rank that asks, as a plug-in of the original cuts them."""
    pieces = []
    for value, total, response in zip(values, batch["total_lengths"], batch["response_lengths"], strict=True):
        chunks = cp_utils.get_logits_and_tokens_offset_with_cp(total, response)[3]
        prompt = total - response
        pieces.append(
            torch.cat([value[begin - prompt : end - prompt] if end else value[:0] for begin, end in chunks])
        )
    return pieces


def shard_of(batch, dp):
    return {name: values[dp::DP] for name, values in batch.items()}


ESTIMATORS = {
    "grpo": dict(),
    "grpo, whitened": dict(advantage_estimator="grpo", normalize_advantages=True),
    "baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.3),
    "discounted, whitened": dict(
        advantage_estimator="reinforce_plus_plus", kl_coef=0.3, gamma=0.9, normalize_advantages=True
    ),
    "ppo": dict(advantage_estimator="ppo", kl_coef=0.3, gamma=0.9, lambd=0.7),
    "distillation": dict(use_opd=True, opd_type="sglang", opd_kl_coef=0.5),
}  # fmt: skip


@pytest.mark.parametrize("variant", ESTIMATORS)
@pytest.mark.parametrize("in_pieces", [True, False])
def test_the_pieces_of_all_ranks_make_up_the_whole(monkeypatch, variant, in_pieces):
    args, batch = run_args(**ESTIMATORS[variant]), random_batch()
    whole = dict(batch)
    loss.compute_advantages_and_returns(args, whole, context=ParallelContext())

    def rank(dp, cp):
        shard = shard_of(batch, dp)
        given = shard | ({name: cut(shard[name], shard) for name in TOKEN_VALUES} if in_pieces else {})
        masks = given["loss_masks"]
        before = {name: list(values) for name, values in given.items()}
        loss.compute_advantages_and_returns(args, given)
        assert given["loss_masks"] is masks
        assert all(
            all(a is b for a, b in zip(given[name], before[name], strict=True)) for name in TOKEN_VALUES
        )
        expected = shard_of(whole, dp)
        names = [*RESULTS, *(["opd_reverse_kl"] if args.use_opd else [])]
        for name in names:
            wanted = cut(expected[name], shard) if in_pieces else expected[name]
            for mine, other in zip(given[name], wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        return sum(map(len, given["advantages"]))

    counts = Ranks(monkeypatch).run(rank)
    assert sum(counts.values()) == sum(batch["response_lengths"]) * (1 if in_pieces else CP)


def layout(monkeypatch, rank=1):
    monkeypatch.setattr(loss, "mpu", None, raising=False)
    monkeypatch.setitem(parallel._of_process, "context", ParallelContext(cp_size=2, cp_rank=rank))


def test_a_token_s_own_reward_needs_no_other_rank_and_few_flags(monkeypatch):
    layout(monkeypatch)
    batch = {"total_lengths": [12], "response_lengths": [7], "rewards": [2.0], "loss_masks": [torch.ones(7)]}
    batch["log_probs"] = cut([torch.zeros(7)], batch)
    args = plugin_args(advantage_estimator="grpo", kl_coef=0.0, use_rollout_logprobs=False)
    loss.compute_advantages_and_returns(args, batch)
    assert batch["advantages"][0].tolist() == [2.0] * 5 == batch["returns"][0].tolist()


def test_what_cannot_be_pieces_is_refused(monkeypatch):
    layout(monkeypatch)
    batch = {"total_lengths": [12], "response_lengths": [7], "rewards": [2.0], "loss_masks": [torch.ones(7)]}
    with pytest.raises(
        ValueError, match=r"log_probs: \[6\] values, wanted \[5\], this rank's pieces of \[7\]"
    ):
        loss.compute_advantages_and_returns(run_args(), batch | {"log_probs": [torch.zeros(6)]})
    batch["log_probs"] = batch["values"] = [torch.zeros(5)]
    with pytest.raises(ValueError, match="no group of ranks that have the others"):
        loss.compute_advantages_and_returns(run_args(advantage_estimator="ppo"), batch)
    contiguous = ParallelContext(cp_size=2, cp_rank=1, contiguous_cp=True)
    with pytest.raises(ValueError, match="--allgather-cp"):
        loss.compute_advantages_and_returns(run_args(), batch, context=contiguous)
