"""The whole loss in float64, written from the formulas: rewards, advantages, losses and their metrics.

It shares no code with ``slime.training`` and knows nothing of micro-batches, ranks and packing. Samples are
dealt with one by one, and the objective is written as papers write it, to be maximised.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from slime.utils.types import Sample
from tests.training.reference_corrections import correct, mean_weight

Vector = torch.Tensor


@dataclass
class Case:
    """A rollout and the flags to train on it with.

    Attributes:
        logits: per sample [L, width] float32 under "ref", "actor" (before training) and "new" (in the step);
            columns from ``args.vocab_size`` on are padding.
    """

    args: Namespace
    samples: list[Sample]
    logits: dict[str, list[torch.Tensor]]
    dp_size: int = 1


@dataclass
class Step:
    """An optimizer step: its loss, its metrics, and the gradient of the loss per sample [L, width]."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[int, torch.Tensor]


@dataclass
class Solution:
    """What training on a case comes to.

    Attributes:
        margin: how far the nearest decision (clipped or not, dropped or not) is from the other one; in
            float32 decisions below about 1e-5 may fall otherwise. Numbers that float32 cannot tell apart well
            enough count as near, too.
    """

    steps: list[Step]
    margin: float


@dataclass
class _Sample:
    """A sample with what is known about its response tokens, each [R] float64.

    ``computed``: whether a pass before the steps gave its log-probs.
    """

    number: int
    execution: int
    group: int
    mask: Vector
    reward: float
    logits: torch.Tensor
    new: Vector
    entropy: Vector
    before: Vector
    reference: Vector
    engine: Vector
    advantage: Vector = field(default_factory=lambda: torch.zeros(0))
    old: Vector = field(default_factory=lambda: torch.zeros(0))
    trainer: Vector = field(default_factory=lambda: torch.zeros(0))
    computed: bool = False


def solve(case: Case) -> Solution:
    args = case.args
    samples = list(_read(case))
    if args.loss_type == "policy_loss":
        _normalise_rewards(args, samples)
    executions: dict[int, list[_Sample]] = {}
    for sample in samples:
        executions.setdefault(sample.execution, []).append(sample)
    size = args.global_batch_size
    count = len(executions) // size
    parts = [[*executions.values()][i * size : (i + 1) * size] for i in range(count)]
    trained = [s for part in parts for execution in part for s in execution]
    margins: list[float] = []
    if args.loss_type == "policy_loss":
        _estimate(args, trained, count, margins)
    return Solution([_step(args, part, margins) for part in parts], min(margins, default=1.0))


def _read(case: Case) -> Iterator[_Sample]:
    args = case.args
    named = {s.rollout_id for s in case.samples if s.rollout_id is not None}
    unnamed = iter(n for n in range(10**6) if n not in named)
    for number, sample in enumerate(case.samples):
        rows = slice(len(sample.tokens) - sample.response_length - 1, len(sample.tokens) - 1)
        tokens = torch.tensor(sample.tokens[len(sample.tokens) - sample.response_length :], dtype=torch.long)

        def chosen(logits: torch.Tensor, rows: slice = rows, tokens: Vector = tokens) -> Vector:
            z = logits.double()[rows, : args.vocab_size] / args.rollout_temperature
            return (z - z.exp().sum(-1, keepdim=True).log()).gather(-1, tokens[:, None])[:, 0]

        leaf = case.logits["new"][number].double().requires_grad_()
        p = (leaf[rows, : args.vocab_size] / args.rollout_temperature).softmax(-1)
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        yield _Sample(
            number=number,
            execution=next(unnamed) if sample.rollout_id is None else sample.rollout_id,
            group=sample.group_index,
            mask=torch.tensor(mask, dtype=torch.float64) * (not sample.remove_sample),
            reward=float(sample.reward),
            logits=leaf,
            new=chosen(leaf),
            entropy=-(p * p.log()).sum(-1),
            before=chosen(case.logits["actor"][number]),
            reference=chosen(case.logits["ref"][number]),
            engine=torch.tensor(sample.rollout_log_probs, dtype=torch.float32).double(),
        )


def _normalise_rewards(args: Namespace, samples: Sequence[_Sample]) -> None:
    """Per group the mean and the deviation of votes; an execution's samples share its vote."""
    if args.advantage_estimator == "rloo" and args.rewards_normalization:
        _leave_one_out(samples)
    group_relative = args.advantage_estimator in ("grpo", "gspo", "cispo")
    if not args.rewards_normalization or not (
        group_relative or args.advantage_estimator == "reinforce_plus_plus_baseline"
    ):
        return
    new_rewards = {}
    for group in {s.group for s in samples}:
        members = [s for s in samples if s.group == group]
        share = {s.number: 1 / sum(o.execution == s.execution for o in members) for s in members}
        votes = len({s.execution for s in members})
        mean = sum(s.reward * share[s.number] for s in members) / votes
        scale = 1.0
        if group_relative and args.grpo_std_normalization and votes > 1:
            squares = sum((s.reward - mean) ** 2 * share[s.number] for s in members)
            scale = (squares / (votes - 1)) ** 0.5 + 1e-6
        new_rewards |= {s.number: (s.reward - mean) / scale for s in members}
    for s in samples:
        s.reward = new_rewards[s.number]


def _leave_one_out(samples: Sequence[_Sample]) -> None:
    baselines = {}
    for s in samples:
        others: dict[int, list[float]] = {}
        for o in samples:
            if o.group == s.group and o.execution != s.execution:
                others.setdefault(o.execution, []).append(o.reward)
        votes = [sum(rewards) / len(rewards) for rewards in others.values()]
        baselines[s.number] = sum(votes) / len(votes) if votes else s.reward
    for s in samples:
        s.reward -= baselines[s.number]


def _kl(kind: str, policy: Vector, base: Vector) -> Vector:
    difference = policy - base
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    return base.exp() / policy.exp() - 1 + difference


def _estimate(args: Namespace, samples: Sequence[_Sample], num_steps: int, margins: list[float]) -> None:
    """Log-probs of the policy before the step, according to trainer and engine, and advantages."""
    needed = num_steps > 1 or args.kl_coef or args.use_rollout_entropy or args.tis_needs_mean
    computed = args.get_mismatch_metrics or (needed and not args.use_rollout_logprobs)
    for s in samples:
        s.computed = bool(computed)
        s.trainer = s.before if computed else s.new.detach()
        s.old = s.engine if args.use_rollout_logprobs else s.trainer
        kl = torch.zeros(len(s.mask), dtype=torch.float64)
        if args.kl_coef:
            kl = _kl(args.kl_loss_type, s.old, s.reference)
            if args.kl_loss_type == "low_var_kl":
                kl = kl.clamp(-10, 10)
        s.advantage = _ADVANTAGES[args.advantage_estimator](args, s, kl)
    if args.normalize_advantages:
        values = torch.cat([s.advantage[s.mask == 1] for s in samples])
        variance = values.var() if len(values) > 1 else torch.zeros(())
        if variance > 0:
            # Below a deviation of 0.01 whitening makes more than 1e-5 of float32's rounding errors.
            margins.append(float(variance) ** 0.5 / 500)
        for s in samples:
            s.advantage = (s.advantage - values.mean()) / (variance + 1e-8) ** 0.5
    # At exactly 0 nothing hangs on the sign.
    margins += [abs(float(a)) for s in samples for a, m in zip(s.advantage, s.mask, strict=True) if m and a]


def _the_reward(args: Namespace, s: _Sample, kl: Vector) -> Vector:
    return torch.full((len(s.mask),), s.reward, dtype=torch.float64)


def _baseline(args: Namespace, s: _Sample, kl: Vector) -> Vector:
    return s.reward - args.kl_coef * kl


def _discounted(args: Namespace, s: _Sample, kl: Vector) -> Vector:
    trained = [t for t in range(len(s.mask)) if s.mask[t]]
    returns = torch.zeros(len(s.mask), dtype=torch.float64)
    if not trained:
        return returns
    for t in range(len(s.mask)):
        for later in range(t, len(s.mask)):
            reward = -args.kl_coef * kl[later] if s.mask[later] else 0.0
            if later == trained[-1]:
                reward = reward + s.reward
            returns[t] += args.gamma ** (later - t) * reward
    return returns


_ADVANTAGES: dict[str, Callable[[Namespace, _Sample, Vector], Vector]] = {
    "grpo": _the_reward,
    "gspo": _the_reward,
    "cispo": _the_reward,
    "rloo": _the_reward,
    "reinforce_plus_plus": _discounted,
    "reinforce_plus_plus_baseline": _baseline,
}


def _step(args: Namespace, executions: Sequence[Sequence[_Sample]], margins: list[float]) -> Step:
    samples = [s for execution in executions for s in execution]
    tokens = sum(max(int(s.mask.sum()), 1) for s in samples)
    weights, pg_weights = {}, {}
    mean = 1.0
    if args.tis_needs_mean and args.loss_type == "policy_loss":
        mean = mean_weight(args, [(s.trainer - s.engine, s.mask) for s in samples])
    for execution in executions:
        total = max(float(sum(s.mask.sum() for s in execution)), 1.0)
        for s in execution:
            weights[s.number] = s.mask / (
                tokens if args.calculate_per_token_loss else total * len(executions)
            )
            pg_weights[s.number] = weights[s.number]
            if args.pg_loss_denominator:
                pg_weights[s.number] = s.mask / (args.pg_loss_denominator * len(executions))
    values: dict[str, list[Vector]] = {}
    for s in samples:
        terms = _sft(s) if args.loss_type == "sft_loss" else _policy(args, s, mean, margins)
        for name, value in terms.items():
            weight = (pg_weights if name == "pg_loss" else weights)[s.number]
            values.setdefault(name, []).append((value[s.mask == 1] * weight[s.mask == 1]).sum())
    sums = {name: torch.stack(parts).sum() for name, parts in values.items()}
    if "other_terms" in sums:
        sums["loss"] = sums["pg_loss"] + sums.pop("other_terms")
    sums["loss"].backward()
    gradients = {s.number: s.logits.grad for s in samples}
    metrics = {name: float(value.detach()) for name, value in sums.items()}
    return Step(metrics["loss"], metrics, gradients)


def _sft(s: _Sample) -> dict[str, Vector]:
    return {"loss": -s.new}


def _policy(args: Namespace, s: _Sample, mean: float, margins: list[float]) -> dict[str, Vector]:
    """Per token the policy-gradient term, the sum of the other terms, and everything that is reported."""
    trained = s.mask == 1
    length = max(float(s.mask.sum()), 1.0)
    drift = ((s.old - s.new)[trained]).sum() / length
    log_ratio = (-drift).expand(len(s.mask)) if args.surrogate == "gspo" else s.new - s.old
    ratio = log_ratio.exp()
    low, high = 1 - args.eps_clip, 1 + args.eps_clip_high
    for bound in (low, high):
        margins += (ratio - bound).abs()[trained].tolist()
    inside = ratio.clamp(low, high)
    if args.surrogate == "cispo":
        objective = inside.detach() * s.advantage * s.new
        clipped = (ratio < low) | (ratio > high)
    else:
        objective = torch.minimum(ratio * s.advantage, inside * s.advantage)
        clipped = inside * s.advantage < ratio * s.advantage
        if args.eps_clip_c is not None:
            floor = args.eps_clip_c * s.advantage
            margins += (objective - floor).abs()[trained & (s.advantage < 0)].tolist()
            objective = torch.where(s.advantage < 0, torch.maximum(objective, floor), objective)
    report = {"pg_clipfrac": clipped.double(), "ppo_kl": -log_ratio, "entropy_loss": s.entropy}
    if not s.computed:
        report["own_log_probs"] = s.new
    if args.use_opsm:
        margins.append(abs(float(drift.detach()) - args.opsm_delta))
        dropped = (s.advantage < 0) & (drift.detach() > args.opsm_delta)
        objective = torch.where(dropped, 0.0, objective)
        report["opsm_clipfrac"] = dropped.double()
    if args.use_tis or args.get_mismatch_metrics:
        found = correct(args, s.trainer, s.engine, s.mask, mean, margins)
        report |= {**found.report, "ois": ratio}
        if args.use_tis or args.custom_tis_function_path:
            objective = objective * found.factor * found.kept
            report |= {name: report[name] * found.kept for name in ("pg_clipfrac", "ppo_kl")}
    other_terms = -args.entropy_coef * s.entropy
    report["pg_loss"] = -objective
    current = s.new if args.use_rollout_logprobs else s.old
    report["train_rollout_logprob_abs_diff"] = (current - s.engine).abs()
    if args.use_kl_loss:
        kl = _kl(args.kl_loss_type, s.new, s.reference)
        if args.use_unbiased_kl:
            kl = kl * (s.new - s.old).exp()
        if args.kl_loss_type == "low_var_kl":
            margins += (kl - 10).abs()[trained].tolist()
            kl = kl.clamp(-10, 10)
        report["kl_loss"] = kl
        other_terms = other_terms + args.kl_loss_coef * kl
    return {"other_terms": other_terms, **report}
