"""Random rollouts with random flags, and what the trainer makes of them in one process.

    case = random_case(seed)
    steps = train(case)              # as the steps of ``reference.solve(case)``

Everything between finished samples and the gradients of logits is the trainer's own code. Only the model is
missing: its logits are given, those before training and those of the step. Data-parallel ranks take turns.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from slime.config.advantages import ESTIMATORS
from slime.config.loss import SURROGATES
from slime.config.run import run_config
from slime.observability.timer import Timer
from slime.observability.train_metric_utils import reduce_train_step_metrics
from slime.training import parallel
from slime.training.conversion import samples_to_train_data, split_train_data_by_dp
from slime.training.losses.scaling import loss_function
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.training.parallel import ParallelContext
from slime.training.roles import ACTOR, Role
from slime.training.trainer import Trainer
from slime.utils.types import Sample
from tests.run_args import run_args
from tests.trainer_batches import _FLAGS
from tests.training.reference import Case, Step
from tests.training.reference_corrections import ICEPOP

VOCAB, PADDING = 7, 2
PAD_MULTIPLE = 4
_SHAPE = dict(model_type="llama", num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)
_SHAPE |= dict(num_query_groups=1, kv_channels=4, padded_vocab_size=VOCAB + PADDING)


def flags(**overrides: Any) -> Namespace:
    """Flags of a trainer with logits of ``VOCAB`` tokens; override any of them."""
    more = dict(vocab_size=VOCAB, max_tokens_per_gpu=16, lr=None)
    return run_args(**{**_FLAGS, **_SHAPE, **more, **overrides})


def random_case(seed: int) -> Case:
    """Ragged samples with ragged masks, groups of several sizes, executions that were split; and flags."""
    pick = random.Random(seed)
    samples = _samples(pick)
    executions = len({s.index if s.rollout_id is None else s.rollout_id for s in samples})
    dp_size = min(pick.choice([1, 1, 2, 3]), executions)
    args = flags(**_loss_flags(pick), **_batch_flags(pick, executions, dp_size))
    if not args.use_dynamic_batch_size:
        dp_size = 1
    return make_case(args, samples, seed, dp_size)


def make_case(args: Namespace, samples: list[Sample], seed: int = 0, dp_size: int = 1) -> Case:
    """Gives the samples logits that lie near one another, and the engine's log-probs near those."""
    generator = torch.Generator().manual_seed(seed)
    logits: dict[str, list[torch.Tensor]] = {"ref": [], "actor": [], "new": []}
    for sample in samples:
        common = torch.randn(len(sample.tokens), VOCAB + PADDING, generator=generator)
        for values in logits.values():
            values.append(common + 0.3 * torch.randn(common.shape, generator=generator))
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        log_probs = (logits["actor"][-1][:, :VOCAB] / args.rollout_temperature).log_softmax(-1)
        near = 0.3 * torch.randn(len(response), generator=generator)
        first = len(sample.tokens) - len(response) - 1
        near += torch.tensor([log_probs[first + t, token] for t, token in enumerate(response)])
        sample.rollout_log_probs = near.tolist()
    return Case(args, samples, logits, dp_size)


def _samples(pick: random.Random) -> list[Sample]:
    samples: list[Sample] = []
    sizes = pick.choice([[1], [1, 1, 1, 2, 3]])
    for group_index in range(pick.randint(1, 3)):
        for _ in range(pick.randint(1, 4)):
            parts = pick.choice(sizes)
            rollout_id = None if parts == 1 and pick.random() < 0.8 else 50 + len(samples)
            for _ in range(parts):
                samples.append(_sample(pick, len(samples), group_index, rollout_id))
    # Whitening needs a trained token, and two samples make a deviation.
    samples[0] = _sample(pick, 0, 0, samples[0].rollout_id, mask=[1, 0, 1])
    return samples


def _sample(
    pick: random.Random,
    index: int,
    group_index: int,
    rollout_id: int | None = None,
    mask: list[int] | None = None,
) -> Sample:
    length = pick.randint(0, 5) if mask is None else len(mask)
    if mask is None:
        mask = pick.choice([[1] * length, [0] * length, *[[pick.randint(0, 1) for _ in range(length)]] * 4])
    return Sample(
        index=index,
        group_index=group_index,
        rollout_id=rollout_id,
        tokens=[pick.randrange(VOCAB) for _ in range(pick.randint(1, 3) + length)],
        response_length=length,
        loss_mask=None if all(mask) and pick.random() < 0.5 else mask,
        remove_sample=index > 0 and pick.random() < 0.1,
        reward=pick.gauss(0, 1),
        status=Sample.Status.COMPLETED,
    )


def _loss_flags(pick: random.Random) -> dict[str, Any]:
    group_relative = ["grpo", "gspo", "cispo", "rloo"]
    estimator = pick.choice([*group_relative, "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
    reinforce = estimator.startswith("reinforce")
    sft = pick.random() < 0.05
    return {
        **dict(advantage_estimator=estimator, loss_type="sft_loss" if sft else "policy_loss"),
        **dict(
            disable_compute_advantages_and_returns=sft, normalize_advantages=reinforce or pick.random() < 0.3
        ),
        **dict(disable_rewards_normalization=pick.random() >= 0.8),
        **dict(disable_grpo_std_normalization=pick.random() >= 0.6),
        **dict(kl_coef=pick.choice([0.0, 0.2]) if reinforce else 0.0, gamma=pick.choice([1.0, 0.8, 0.0])),
        **dict(use_kl_loss=pick.random() < 0.6, kl_loss_coef=pick.choice([0.0, 0.3])),
        **dict(kl_loss_type=pick.choice(["k1", "k2", "k3", "low_var_kl"])),
        **dict(use_unbiased_kl=pick.random() < 0.4, entropy_coef=pick.choice([0.0, 0.1, -0.05, 1.0])),
        **dict(eps_clip=pick.uniform(0.05, 0.3), eps_clip_high=pick.uniform(0.05, 0.4)),
        **dict(eps_clip_c=pick.choice([None, 1.1, 1.5])),
        **dict(use_opsm=pick.random() < 0.3, opsm_delta=pick.choice([1e-4, 0.05])),
        **pick.choice([{"calculate_per_token_loss": True}, {}, {"pg_loss_denominator": pick.uniform(1, 9)}]),
        **dict(use_rollout_entropy=pick.random() < 0.1),
        **dict(rollout_temperature=pick.choice([1.0, 0.7, 1.4]), log_probs_chunk_size=pick.choice([-1, 3])),
        **dict(recompute_loss_function=pick.random() < 0.1),
        **_engine_flags(pick),
        **dict(surrogate=None if ESTIMATORS[estimator].surrogate else pick.choice([None, *SURROGATES])),
    }


def _engine_flags(pick: random.Random) -> dict[str, Any]:
    modes = ["none", "none", "old", "tis", "icepop", "mis", "mis", "mismatch", "old and mismatch"]
    mode = pick.choice([*modes, "mis mismatch"])
    custom = ICEPOP if mode in ("icepop", "mismatch", "old and mismatch") else None
    use_tis = mode in ("tis", "icepop", "mis")
    mean = pick.random() < 0.4
    return {
        **dict(use_rollout_logprobs="old" in mode, get_mismatch_metrics="mismatch" in mode),
        **dict(use_tis=use_tis, tis_clip=pick.uniform(1.0, 1.5)),
        **dict(tis_clip_low=pick.choice([0.0, 0.7, 0.9])),
        **dict(custom_tis_function_path=custom, tis_type="mis" if "mis" in mode.split() else None),
        **dict(tis_batch_normalize=mean and mode == "mis"),
        **_mis_flags(pick),
    }


def _mis_flags(pick: random.Random) -> dict[str, Any]:
    levels = ["token", "sequence", "geometric"]
    return {
        **dict(tis_level=pick.choice(levels), tis_mode=pick.choice(["truncate", "clip", "mask"])),
        **dict(tis_lower_bound=pick.uniform(0.5, 0.95), tis_upper_bound=pick.uniform(1.05, 1.6)),
        **dict(use_rs=pick.random() < 0.5, rs_level=pick.choice(levels)),
        **dict(rs_lower_bound=pick.uniform(0.4, 0.9), rs_upper_bound=pick.uniform(1.1, 2.0)),
        **dict(rs_veto_threshold=pick.choice([None, 0.6, 0.8])),
    }


def _batch_flags(pick: random.Random, executions: int, dp_size: int) -> dict[str, Any]:
    balance = pick.random() < 0.3
    step = pick.choice([pick.randint(dp_size, executions), max(dp_size, executions // 2)])
    return {
        **dict(global_batch_size=step, micro_batch_size=1),
        **dict(use_dynamic_batch_size=pick.random() < 0.9, max_tokens_per_gpu=pick.choice([1, 12, 100])),
        **dict(balance_data=balance, balance_by_flops=balance and pick.random() < 0.5),
    }


def train(case: Case, role: Role = ACTOR) -> list[Step]:
    """The optimizer steps of the case, by the trainer's code."""
    layout = dict(dp_size=case.dp_size, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    config = run_config(case.args)
    shards = split_train_data_by_dp(config, samples_to_train_data(config, case.samples), layout)
    group: Any = object()
    reductions = _Reductions(group)
    passes = 1 + case.args.normalize_advantages + case.args.tis_needs_mean
    for number in range(passes):
        reductions.known = number
        steps: list[_StepOfRanks] = []
        leaves = [logits.clone().requires_grad_() for logits in case.logits["new"]]
        for rank, shard in enumerate(shards):
            context = ParallelContext(
                dp_group=group, dp_rank=rank, dp_size=case.dp_size, pad_multiple=PAD_MULTIPLE
            )
            backend: Any = GivenLogits(case, leaves, context, steps)
            with reductions.of_rank(rank), patch.dict(parallel._of_process, context=context):
                Trainer(config, role, backend, Timer()).train(0, tensorize(shard, torch.device("cpu")))
    return [step.result(case, leaves) for step in steps]


@dataclass
class _StepOfRanks:
    """What the ranks computed in one optimizer step, and how megatron-core scales gradients."""

    num_microbatches: int
    global_batch_size: int
    numbers: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    normalisers: list[torch.Tensor] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def result(self, case: Case, leaves: Sequence[torch.Tensor]) -> Step:
        per_token = case.args.calculate_per_token_loss
        divisor = sum(map(float, self.normalisers)) if per_token else self.num_microbatches * case.dp_size
        metrics = reduce_train_step_metrics(
            self.reports,
            calculate_per_token_loss=per_token,
            step_global_batch_size=self.global_batch_size,
            cp_size=1,
            dp_with_cp_group=None,
        )
        gradients = {n: leaves[n].grad / divisor for n in self.numbers}
        return Step(sum(map(float, self.losses)) / divisor, metrics, gradients)


class GivenLogits:
    """A `TrainBackend` without a model: each sample has logits under every tag of weights."""

    def __init__(
        self, case: Case, leaves: list[torch.Tensor], context: ParallelContext, steps: list[_StepOfRanks]
    ) -> None:
        self.context, self.device, self.versions = context, torch.device("cpu"), self
        self.backup_tags: list[str] = []
        self._case, self._leaves, self._steps, self._tag = case, leaves, steps, "actor"

    @contextmanager
    def entered(self, tag: str) -> Iterator[None]:
        self._tag = tag
        yield

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, batch: Any, data: DataIterator, head: Callable, prefix: str) -> dict[str, list[Any]]:
        outputs: dict[str, list[Any]] = {}
        for _ in range(sum(batch["num_microbatches"])):
            micro_batch = packed_micro_batch(data, ["sample_indices"], PAD_MULTIPLE)
            logits = self._pack(micro_batch, self._case.logits[self._tag])
            for name, values in head(logits, micro_batch).items():
                outputs.setdefault(prefix + name, []).extend(values)
        return outputs

    def step(
        self,
        rollout_id: int,
        step_id: int,
        data: DataIterator,
        keys: Sequence[str],
        loss: Callable,
        num_microbatches: int,
        step_global_batch_size: int,
    ) -> dict[str, float]:
        if step_id == len(self._steps):
            self._steps.append(_StepOfRanks(num_microbatches, step_global_batch_size))
        step = self._steps[step_id]
        for _ in range(num_microbatches):
            micro_batch = packed_micro_batch(data, keys, PAD_MULTIPLE)
            logits = self._pack(micro_batch, self._leaves)
            value, normaliser, report = loss_function(
                self._case.args,
                micro_batch,
                num_microbatches,
                step_global_batch_size,
                loss,
                logits,
                self.context,
            )
            value.backward()
            step.numbers += micro_batch["sample_indices"]
            step.losses.append(value.detach())
            step.normalisers.append(normaliser)
            step.reports.append(report)
        return {}

    def _pack(self, micro_batch: dict[str, Any], logits: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([logits[number] for number in micro_batch["sample_indices"]])
        padding = micro_batch["tokens"].size(1) - len(rows)
        return torch.cat([rows, rows.new_zeros(padding, rows.size(1))])[None]


class _Reductions:
    """Sums over ranks that take turns: the nth is noted in the nth pass over all of them, known thereafter.

    Attributes:
        known: how many reductions of a rank are known in this pass.
    """

    def __init__(self, group: Any) -> None:
        self._group, self.known = group, 0
        self._parts: dict[tuple[int, int], torch.Tensor] = {}

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        calls = count()

        def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
            assert group is self._group
            number = next(calls)
            if number < self.known:
                parts = [part for (call, _), part in self._parts.items() if call == number]
                tensor.copy_(torch.stack(parts).sum(0))
            else:
                self._parts[number, rank] = tensor.clone()
                tensor += 1  # a rank without trained tokens has to get to the next pass, too

        with (
            patch("torch.distributed.is_initialized", lambda: True),
            patch("torch.distributed.all_reduce", all_reduce),
        ):
            yield
