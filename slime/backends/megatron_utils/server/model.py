"""The model behind the server: asked by all of its ranks together."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint, load_weights
from slime.backends.megatron_utils.hf_weights import load_hf_weights
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.model_provider import get_model
from slime.backends.megatron_utils.moe import in_half
from slime.backends.megatron_utils.server.arguments import MegatronServerConfig
from slime.backends.megatron_utils.step import TrainState, forward_only
from slime.config.backend import BackendConfig
from slime.config.run import filled
from slime.training.backend import Outputs
from slime.training.checkpoint_dir import find_checkpoint
from slime.training.micro_batches import DataIterator
from slime.training.parallel import ParallelContext
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy
from slime.utils.accelerator import process_group_backend


@dataclass(frozen=True)
class Question:
    """What is asked about a sequence.

    Attributes:
        ids: [L], at least one.
        sample_n: tokens to draw after each of them.
        labels: tokens whose log-probs after each of them are asked for: [K], or [L, K].
    """

    ids: Sequence[int]
    sample_n: int = 0
    labels: Sequence[Any] = ()


class LogProbModel:
    """A model that computes and does not learn; methods are collective over its ranks.

    Raises:
        ValueError: weights are missing, or do not fit.
    """

    def __init__(self, args: Namespace) -> None:
        self._config = config = filled(MegatronServerConfig, args)
        if "RANK" not in os.environ and not dist.is_initialized():
            dist.init_process_group(process_group_backend(), store=dist.HashStore(), rank=0, world_size=1)
        # It is no run: what follows from flags of one is not there.
        self._run = filled(BackendConfig, args, thin=True)
        init(self._run)
        self._context = ParallelContext.current()
        chunks = get_model(self._run)
        if config.params_dtype != torch.float32:
            chunks = [in_half(get_model_config(chunk), chunk) for chunk in chunks]
        self._state = cast(TrainState, SimpleNamespace(model=chunks, replay=None))
        self.load(config.first_weights)

    def load(self, path: str | Path) -> None:
        """Overwrites the weights with those of a Hugging Face directory, or of a Megatron checkpoint."""
        if is_megatron_checkpoint(path):
            load_weights(self._state, find_checkpoint(path)[1])
        else:
            load_hf_weights(self._run.model, self._state.model, path, with_mtp=False)

    def answer(self, question: Question) -> dict[str, Any]:
        """Returns on every rank ``log_probs`` [L - 1] of the tokens, and as lists what else was asked for.

        All are natural logarithms at temperature 1.
        """
        ids = torch.tensor(question.ids, device=next(self._state.model[0].parameters()).device)
        response = len(ids) - 1
        batch = {"tokens": [ids], "loss_masks": [torch.ones_like(ids[1:], dtype=torch.int)]}
        data = DataIterator({**batch, "total_lengths": [len(ids)], "response_lengths": [response]}, [[0]])
        head = partial(self._read, question)
        outputs = forward_only(self._run, self._state, data, [1], self._context, head)
        # The last pipeline stage has them, and so does the last rank.
        told = [{name: values[0].tolist() for name, values in outputs.items()}]
        dist.broadcast_object_list(told, src=dist.get_world_size() - 1)
        return told[0]

    def _read(self, question: Question, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
        (ids,) = batch["unconcat_tokens"]
        rows, config = logits[0, : len(ids)], self._config
        log_probs, _ = vocab_parallel_log_prob_entropy(
            rows[:-1], ids[1:], self._context.tp_group, entropy_gradient=False, vocab_size=config.vocab_size
        )
        outputs = {"log_probs": [log_probs]}
        if count := question.sample_n:
            parts = map(self._whole, rows.split(config.teacher_sample_reduction_chunk_size))
            drawn = [(torch.multinomial(part.exp(), count, replacement=True), part) for part in parts]
            outputs["sampled_token_ids"] = [torch.cat([tokens for tokens, _ in drawn])]
            outputs["sampled_log_probs"] = [torch.cat([part.gather(1, tokens) for tokens, part in drawn])]
        if question.labels:
            size, labels = (
                config.teacher_label_reduction_chunk_size,
                torch.tensor(question.labels).to(rows.device),
            )
            wanted = labels.expand(len(rows), labels.size(-1)).split(size)
            pairs = zip(rows.split(size), wanted, strict=True)
            read = [self._whole(some).gather(1, tokens) for some, tokens in pairs]
            outputs["label_token_log_probs"] = [torch.cat(read)]
        return outputs

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, V] log-probs in float32, of all slices of the vocabulary."""
        mine, group = rows.float(), self._context.tp_group
        if group is not None:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            mine = torch.cat(parts, dim=1)
        return mine[:, : self._config.vocab_size].log_softmax(dim=1)
