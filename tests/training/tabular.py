"""A `TrainBackend` whose model is a table of bigrams, so that a policy's exact KL can be written down."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slime.config.run import run_config
from slime.observability.timer import Timer
from slime.training.conversion import samples_to_train_data, split_train_data_by_dp
from slime.training.losses.scaling import loss_function
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.training.parallel import ParallelContext
from slime.training.roles import ACTOR
from slime.training.trainer import Trainer
from slime.training.versions import WeightVersions
from slime.utils.types import Sample
from tests.training.cases import VOCAB


class TabularBackend:
    """Logits of the next token are the row of the last one, trained by Adam."""

    def __init__(self, args: Any, table: torch.Tensor, lr: float) -> None:
        self.table = table.clone().requires_grad_()
        self.context, self.device = ParallelContext(), torch.device("cpu")
        self.versions = WeightVersions(lambda: [("table", self.table)])
        self._args, self._optimizer = args, torch.optim.Adam([self.table], lr=lr, betas=(0.9, 0.98))

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def forward(self, batch: Any, data: DataIterator, head: Callable, prefix: str) -> dict[str, list[Any]]:
        outputs: dict[str, list[Any]] = {}
        for _ in range(sum(batch["num_microbatches"])):
            micro_batch = packed_micro_batch(data, [], 1)
            for name, values in head(self._logits(micro_batch), micro_batch).items():
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
        self._optimizer.zero_grad()
        for _ in range(num_microbatches):
            micro_batch = packed_micro_batch(data, keys, 1)
            value, _, report = loss_function(
                *(self._args, micro_batch, num_microbatches, step_global_batch_size, loss),
                self._logits(micro_batch),
                self.context,
            )
            (value / num_microbatches).backward()
        self._optimizer.step()
        return {name: float(x) for name, x in zip(report["keys"], report["values"][1:], strict=True)}

    def _logits(self, micro_batch: dict[str, Any]) -> torch.Tensor:
        return self.table[micro_batch["tokens"][0]][None]


R = 8
"""Tokens of an answer."""
_LAYOUT = dict(dp_size=1, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)


def rollout(table, generator, count=32):
    """Answers of the policy to single-token prompts, rewarded with 0."""
    probabilities, samples = table.detach().softmax(-1), []
    for index in range(count):
        tokens = [index % VOCAB]
        for _ in range(R):
            tokens.append(int(torch.multinomial(probabilities[tokens[-1]], 1, generator=generator)))
        samples.append(Sample(index=index, group_index=index, tokens=tokens, response_length=R, reward=0.0))
    return samples


def train(args, backend, samples, rollout_id=0):
    config = run_config(args)
    (shard,) = split_train_data_by_dp(config, samples_to_train_data(config, samples), _LAYOUT)
    batch = tensorize(shard, torch.device("cpu"))
    Trainer(config, ACTOR, backend, Timer()).train(rollout_id, batch)
    return batch
