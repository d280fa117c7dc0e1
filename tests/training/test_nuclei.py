"""Log-probs within nuclei against float64, in one process and split by vocabulary and by context."""

from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.training.context_parallel import RowSplit
from slime.training.log_probs import calculate_log_probs_and_entropy, response_log_probs
from slime.training.loss_plugins import build_topp_keep_mask, get_log_probs_and_entropy
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.training.nuclei import check_nuclei
from slime.training.nucleus_rows import IDS, OFFSETS
from slime.training.parallel import ParallelContext, set_current
from tests.each import hold_each
from tests.megatron_harness import run_ranks
from tests.run_args import with_groups
from tests.trainer_batches import _FLAGS, random_rollout, split

VOCAB, WIDTH, SEEDS = 29, 36, range(6)
ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1, "dp_rank": 0}


def flags(seed: int) -> Namespace:
    """Temperatures and row chunks in turn."""
    more = dict(rollout_temperature=(1.0, 0.6, 1.7)[seed % 3], log_probs_chunk_size=(-1, 1, 7)[seed // 2])
    return with_groups(
        {**_FLAGS, "vocab_size": VOCAB, "max_tokens_per_gpu": 10_000, "replays_nucleus": True, **more}
    )


def random_nuclei(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Draws nuclei of random sizes, some without the drawn token; none of a third of the untrained tokens."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda most: int(torch.randint(most, (), generator=generator))
    batch |= {IDS: [], OFFSETS: []}
    for tokens, mask in zip(batch["tokens"], batch["loss_masks"], strict=True):
        ids: list[int] = []
        offsets = [0]
        for trained, token in zip(mask, tokens[len(tokens) - len(mask) :], strict=True):
            if trained or pick(3):
                nucleus = torch.randperm(VOCAB, generator=generator)[: 1 + pick(VOCAB)].tolist()
                ids += nucleus if token in nucleus or pick(2) else [*nucleus, token]
            offsets.append(len(ids))
        batch[IDS].append(ids)
        batch[OFFSETS].append(offsets)
    return batch


def micro_batch(args: Namespace, seed: int, context: ParallelContext) -> dict[str, Any]:
    batch = random_nuclei(random_rollout(VOCAB, seed=seed), seed)
    shard = tensorize(split(args, batch, ONE_RANK), torch.device("cpu"))
    return packed_micro_batch(DataIterator(shard, shard["micro_batch_indices"]), (), 4, context)


def whole_logits(rows: int, seed: int) -> torch.Tensor:
    logits = 4 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    logits[:, VOCAB:] += 30  # padding rows of the vocabulary, which must not matter
    logits[0, :3] += 200  # a nucleus far below its row's largest logit
    return logits


def weights(count: int) -> torch.Tensor:
    return torch.randn(2, count, generator=torch.Generator().manual_seed(count), dtype=torch.double)


def expected(args: Namespace, batch: dict[str, Any], logits: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs, entropies and the logits' gradient by autograd in float64, from a dense mask."""
    rows, targets, kept, start = [], [], [], 0
    samples = zip(
        batch["unconcat_tokens"], batch["segment_lengths"], batch[IDS], batch[OFFSETS], strict=False
    )
    for tokens, length, ids, offsets in samples:
        response = len(offsets) - 1
        for i in range(response):
            position = len(tokens) - response + i
            rows.append(start + position - 1)
            targets.append(int(tokens[position]))
            nucleus = ids[offsets[i] : offsets[i + 1]]
            kept.append([not nucleus or token in nucleus or token == targets[-1] for token in range(VOCAB)])
        start += length
    x = logits.double().requires_grad_()
    z = x[rows, :VOCAB] / args.rollout_temperature
    among = z.masked_fill(~torch.tensor(kept), -torch.inf).log_softmax(-1)
    log_p = z.log_softmax(-1)
    found = among[range(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)
    by_token = weights(len(targets))
    (by_token[0] @ found[0] + by_token[1] @ found[1]).backward()
    assert x.grad is not None
    return [found[0].detach(), found[1].detach(), x.grad]


def found_here(seed: int, context: ParallelContext) -> list[torch.Tensor]:
    """Computes the log-probs by our code, of this rank's part of the logits."""
    args = flags(seed)
    batch = micro_batch(args, seed, context)
    rows = RowSplit.of(batch["segment_lengths"], context)
    part = whole_logits(sum(batch["segment_lengths"]), seed)[rows.rows]
    x = part.chunk(2, -1)[context.tp_rank] if context.tp_group is not None else part
    x = x.clone()[None].requires_grad_()
    log_probs, entropies = map(torch.cat, response_log_probs(args, x, batch, context))
    by_token = weights(len(log_probs)).float()
    (by_token[0] @ log_probs + by_token[1] @ entropies).backward()
    assert x.grad is not None
    return [log_probs.detach(), entropies.detach(), x.grad[0]]


def check(seed: int, context: ParallelContext, parts: list[list[torch.Tensor]]) -> None:
    """What the ranks of a vocabulary- or context-parallel group have, against all in one."""
    args = flags(seed)
    batch = micro_batch(args, seed, context)
    wanted = expected(args, batch, whole_logits(sum(batch["segment_lengths"]), seed))
    for log_probs, entropies, _ in parts:
        torch.testing.assert_close(log_probs.double(), wanted[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(entropies.double(), wanted[1], atol=2e-5, rtol=0)
    gradients = [gradient for *_, gradient in parts]
    if context.cp_size > 1:
        gradient = torch.zeros_like(wanted[2], dtype=torch.float32)
        for rank, part in enumerate(gradients):
            split_ = RowSplit(tuple(batch["segment_lengths"]), context.cp_size, rank, context.contiguous_cp)
            gradient[split_.rows] = part
    else:
        gradient = torch.cat(gradients, -1)
    torch.testing.assert_close(gradient.double(), wanted[2], atol=2e-5, rtol=0)


def test_values_and_gradients_are_those_of_float64() -> None:
    context = ParallelContext()
    hold_each(SEEDS, lambda seed: check(seed, context, [found_here(seed, context)]))


def _context(kind: str, rank: int) -> ParallelContext:
    if kind == "tp":
        return ParallelContext(tp_group=dist.group.WORLD, tp_rank=rank)
    return ParallelContext(
        cp_group=dist.group.WORLD, cp_rank=rank, cp_size=2, contiguous_cp=kind == "contiguous"
    )


def _on_rank(rank: int, kinds: list[str]) -> dict[str, list[list[torch.Tensor]]]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return {kind: [found_here(seed, _context(kind, rank)) for seed in SEEDS] for kind in kinds}


def test_they_are_when_vocabulary_or_context_is_split() -> None:
    kinds = ["tp", "zigzag", "contiguous"]
    ranks = run_ranks(_on_rank, 2, kinds)

    def holds(kind: str) -> None:
        context = (
            ParallelContext()
            if kind == "tp"
            else ParallelContext(cp_size=2, contiguous_cp=kind == "contiguous")
        )
        for seed in SEEDS:
            check(seed, context, [rank[kind][seed] for rank in ranks])

    hold_each(kinds, holds)


def test_a_plug_in_gets_the_same_by_a_mask_of_the_logits_and_by_parts_of_the_batch() -> None:
    args, context = flags(1), ParallelContext()
    batch = micro_batch(args, 1, context)
    logits = whole_logits(sum(batch["segment_lengths"]), 1)[None]
    wanted = torch.cat(response_log_probs(args, logits, batch, context)[0])
    lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
    nuclei = {key: batch[key] for key in (IDS, OFFSETS)}
    parts = dict(unconcat_tokens=batch["unconcat_tokens"], **lengths, **nuclei)
    assert torch.equal(torch.cat(get_log_probs_and_entropy(logits, args=args, **parts)["log_probs"]), wanted)
    mask = build_topp_keep_mask(
        logits.size(1),
        WIDTH,
        logits.device,
        nuclei[IDS],
        nuclei[OFFSETS],
        *lengths.values(),
        allgather_cp=False,
    )
    mask[:, VOCAB:] = False
    targets = batch["tokens"][0].roll(-1)
    scaled = logits[0] / args.rollout_temperature
    masked, _ = calculate_log_probs_and_entropy(scaled, targets, None, log_prob_keep_mask=mask)
    start, rows = 0, []
    for tokens, response in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        rows += range(start + len(tokens) - response - 1, start + len(tokens) - 1)
        start += len(tokens)
    torch.testing.assert_close(masked[rows, 0], wanted, atol=1e-5, rtol=0)


def _on_tp_rank(rank: int) -> torch.Tensor:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    set_current(ParallelContext(tp_group=dist.group.WORLD, tp_rank=rank))
    return _mask(WIDTH // 2)


def _mask(width: int) -> torch.Tensor:
    batch = micro_batch(flags(2), 2, ParallelContext())
    build = partial(build_topp_keep_mask, sum(batch["segment_lengths"]), width, torch.device("cpu"))
    return build(batch[IDS], batch[OFFSETS], batch["total_lengths"], batch["response_lengths"])


def test_the_mask_of_the_logits_is_split_as_they_are() -> None:
    whole = _mask(WIDTH)
    assert torch.equal(torch.cat(run_ranks(_on_tp_rank, 2), -1), whole)


def test_a_batch_without_nuclei_or_with_wrong_ones_is_refused_by_name() -> None:
    good = random_nuclei(random_rollout(VOCAB, num_samples=1), 0)
    check_nuclei(good, VOCAB)
    (ids,), (offsets,), (mask,) = good[IDS], good[OFFSETS], good["loss_masks"]
    empty = [offset - offsets[-2] if i == len(mask) - 1 else 0 for i, offset in enumerate(offsets)]
    rows = [
        ({IDS: None}, "no sample has rollout_top_p_token_ids"),
        ({OFFSETS: None}, "no sample has rollout_top_p_token_offsets"),
        (
            {OFFSETS: [offsets[:-1]]},
            f"sample 0: {len(mask)} offsets of nuclei for {len(mask)} response tokens",
        ),
        ({IDS: [ids[1:]]}, "do not rise from 0 to"),
        ({OFFSETS: [[offsets[-1], *offsets[1:]]]}, "do not rise from 0 to"),
        ({IDS: [[VOCAB, *ids[1:]]]}, f"to {VOCAB} in its nuclei, wanted 0 to {VOCAB - 1}"),
        ({IDS: [[]], OFFSETS: [[0] * len(empty)]}, "tokens that are trained on have no nucleus"),
    ]

    def refuses(row: tuple[dict[str, Any], str]) -> None:
        batch = {key: value for key, value in (good | row[0]).items() if value is not None}
        with pytest.raises(ValueError, match=row[1]):
            check_nuclei(batch, VOCAB)

    hold_each(rows, refuses)


def test_log_probs_without_recorded_nuclei_are_refused() -> None:
    args, context = flags(0), ParallelContext()
    batch = micro_batch(args, 0, context)
    logits = whole_logits(sum(batch["segment_lengths"]), 0)[None]
    del batch[IDS]
    with pytest.raises(ValueError, match="--rollout-top-p, --rollout-top-k: the micro-batch lacks"):
        response_log_probs(args, logits, batch, context)
    response_log_probs(args, logits, batch, context, whole_vocabulary=True)
