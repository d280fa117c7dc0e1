"""What losses of the user's call for log-probs and values, with the arguments that the original takes.

Our own losses hand a whole micro-batch to `response_log_probs` and `response_values`; these take its parts.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from slime.config.advantages import ESTIMATORS, AdvantageConfig
from slime.config.estimation import EstimationConfig
from slime.config.loss import LogitsConfig
from slime.config.run import filled, run_config
from slime.training import advantages
from slime.training.context_parallel import RowSplit, segment_multiple
from slime.training.cp_plugins import all_gather_with_cp, own_tokens
from slime.training.log_probs import response_log_probs
from slime.training.losses import policy, sft, value
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.nucleus_rows import IDS, OFFSETS
from slime.training.parallel import ParallelContext
from slime.training.values import response_values
from slime.utils.types import RolloutBatch

Tensors = list[torch.Tensor]


class Results(tuple[torch.Tensor, dict[str, Tensors]]):
    """An empty tensor and results by name, as ``_, results = ...``; or asked by name: ``...["log_probs"]``.

    Versions of the original differ in which of the two they return.
    """

    def __new__(cls, results: dict[str, Tensors]) -> "Results":
        device = next((tensor.device for tensors in results.values() for tensor in tensors), None)
        return super().__new__(cls, (torch.empty(0, device=device), results))

    def __getitem__(self, key: Any) -> Any:
        return self[1][key] if isinstance(key, str) else super().__getitem__(key)


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: LogitsConfig,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    rollout_top_p_token_ids: Sequence[Any] | None = None,
    rollout_top_p_token_offsets: Sequence[Any] | None = None,
    context: ParallelContext | None = None,
) -> Results:
    """``log_probs`` of the response tokens and, ``with_entropy``, ``entropy``: per sample [R] float32.

    Both are differentiable, and whole responses on every context-parallel rank.

    Args:
        logits: [1, T / cp, V / tp], as a loss gets them; they are divided by the rollout temperature.
        unconcat_tokens, total_lengths, response_lengths: entries of the micro-batch.
        non_loss_data: has no effect.
        rollout_top_p_token_ids, rollout_top_p_token_offsets: of the micro-batch as well, where nuclei are
            replayed.
        context: the layout, that of this process if not given; so it is for all functions here.

    Raises:
        ValueError: nuclei are to be replayed, and there are none.
    """
    batch = _batch(logits, unconcat_tokens, total_lengths, response_lengths, context)
    batch |= {IDS: rollout_top_p_token_ids, OFFSETS: rollout_top_p_token_offsets}
    log_probs, entropies = response_log_probs(args, logits, batch, context, entropy_gradient=with_entropy)
    return Results({"log_probs": log_probs, **({"entropy": entropies} if with_entropy else {})})


def get_values(
    logits: torch.Tensor,
    *,
    args: LogitsConfig,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    context: ParallelContext | None = None,
) -> Results:
    """``values`` of the states before the response tokens, per sample [R] float32, off a critic's outputs.

    Args:
        logits: [1, T / cp, 1], which no temperature divides.
        with_entropy, non_loss_data: have no effect.
    """
    batch = _batch(logits, unconcat_tokens, total_lengths, response_lengths, context)
    return Results({"values": response_values(logits, batch, context)})


def policy_loss_function(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Returns the policy loss of a micro-batch, for a loss of the user's that adds to it."""
    return policy.policy_loss_function(run_config(args), batch, logits, sum_of_sample_mean, context)


def sft_loss_function(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Returns the loss of supervised fine-tuning of a micro-batch."""
    return sft.sft_loss_function(run_config(args), batch, logits, sum_of_sample_mean, context)


def value_loss_function(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Returns the loss of a critic on a micro-batch."""
    return value.value_loss_function(run_config(args), batch, logits, sum_of_sample_mean, context)


def compute_advantages_and_returns(
    args: Namespace, rollout_data: RolloutBatch, context: ParallelContext | None = None
) -> None:
    """Adds ``kl``, ``advantages`` and ``returns`` to ``rollout_data``, as its log-probs and values are.

    These are whole responses, or a context-parallel rank's pieces of all of them; masks are whole. What an
    advantage takes from other tokens, by a discount or whitening, is computed from the pieces of all ranks,
    which then have to make this call together. A function of the user's own is given the pieces, unless its
    advantages are whitened.

    Raises:
        ValueError: values of another length; pieces under ``--allgather-cp``.
    """
    config = filled(EstimationConfig, args, thin=True)
    context = context or ParallelContext.current()
    if context.cp_size == 1:
        return advantages.compute_advantages_and_returns(config, rollout_data, context)
    pieces, whole = _has_pieces(rollout_data, context), _looks_at_other_tokens(config.advantages)
    as_given: RolloutBatch = {}
    if whole:
        as_given = {name: rollout_data[name] for name in _token_values(rollout_data)}
        rollout_data |= {n: _gathered(values, rollout_data, context) for n, values in as_given.items()}
    elif pieces:
        as_given = {"loss_masks": rollout_data["loss_masks"]}
        rollout_data["loss_masks"] = _own(rollout_data["loss_masks"], rollout_data, context)
    try:
        advantages.compute_advantages_and_returns(config, rollout_data, context)
    finally:
        rollout_data |= as_given
    for name in _RESULTS & rollout_data.keys() if whole and pieces else ():
        rollout_data[name] = _own(rollout_data[name], rollout_data, context)


_RESULTS = {"kl", "advantages", "returns", "opd_reverse_kl"}


def _looks_at_other_tokens(config: AdvantageConfig) -> bool:
    discounted = ESTIMATORS[config.advantage_estimator].discounted
    return config.normalize_advantages or (discounted and not config.custom_advantage_function_path)


def _token_values(rollout_data: RolloutBatch) -> dict[str, Tensors]:
    names = ("log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values")
    return {name: rollout_data[name] for name in names if rollout_data.get(name) is not None}


def _has_pieces(rollout_data: RolloutBatch, context: ParallelContext) -> bool:
    lengths = rollout_data["response_lengths"]
    found = {name: [len(value) for value in values] for name, values in _token_values(rollout_data).items()}
    if all(sizes == list(lengths) for sizes in found.values()):
        return False
    own = [len(mask) for mask in _own(rollout_data["loss_masks"], rollout_data, context)]
    for name, sizes in found.items():
        if sizes != own:
            raise ValueError(f"{name}: {sizes} values, wanted {own}, this rank's pieces of {list(lengths)}")
    return True


def _gathered(values: Tensors, rollout_data: RolloutBatch, context: ParallelContext) -> Tensors:
    sizes = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    return [all_gather_with_cp(value, *size, context) for value, size in zip(values, sizes, strict=True)]


def _own(values: Tensors, rollout_data: RolloutBatch, context: ParallelContext) -> Tensors:
    """This rank's pieces of whole responses."""
    sizes = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    places = [own_tokens(*size, context) for size in sizes]
    return [value[place.to(value.device)] for value, place in zip(values, places, strict=True)]


def build_topp_keep_mask(
    T: int,
    vocab_local: int,
    device: torch.device,
    top_p_token_ids: Sequence[Any],
    top_p_token_offsets: Sequence[Any],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    allgather_cp: bool = False,
    context: ParallelContext | None = None,
) -> torch.Tensor:
    """[T, V / tp] bool: which logits of this rank's rows count in a log-prob; all, where there is no nucleus.

    For `calculate_log_probs_and_entropy`, which keeps each row's target besides. Our own losses build no such
    tensor.
    """
    context = replace(context or ParallelContext.current(), contiguous_cp=allgather_cp)
    multiple = segment_multiple(context)
    lengths = [length + -length % multiple for length in total_lengths]
    padding = T * context.cp_size - sum(lengths)
    split = RowSplit.of([*lengths, *([padding] if padding else [])], context)
    place = torch.full((T * context.cp_size,), -1)
    place[split.rows] = torch.arange(T)
    first = vocab_local * (dist.get_rank(context.tp_group) if context.tp_group is not None else 0)
    keep = torch.ones(T, vocab_local, dtype=torch.bool, device=device)
    start = 0
    for i, length in enumerate(lengths):
        begin = start + total_lengths[i] - response_lengths[i] - 1
        ids = torch.as_tensor(top_p_token_ids[i], device="cpu") - first
        sizes = torch.as_tensor(top_p_token_offsets[i], device="cpu").diff()
        rows = place[begin : begin + len(sizes)]
        recorded = rows[(sizes > 0) & (rows >= 0)].to(device)
        keep[recorded] = False
        of_ids = rows.repeat_interleave(sizes)
        here = (of_ids >= 0) & (ids >= 0) & (ids < vocab_local)
        keep[of_ids[here].to(device), ids[here].long().to(device)] = True
        start += length
    return keep


def _batch(
    logits: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    context: ParallelContext | None,
) -> dict[str, Any]:
    """The parts, with the lengths of the packed row's segments; how much padding it has, ``logits`` tell."""
    context = context or ParallelContext.current()
    multiple = segment_multiple(context)
    segments = [length + -length % multiple for length in total_lengths]
    padding = logits.size(1) * context.cp_size - sum(segments)
    return {
        "unconcat_tokens": tokens,
        "response_lengths": response_lengths,
        "segment_lengths": [*segments, *([padding] if padding else [])],
    }
