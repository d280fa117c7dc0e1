"""The loss of multi-token prediction (MTP) layers as a part of optimizer steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.mtp import MtpLayers
from slime.config.backend import BackendConfig
from slime.models.mtp import trained_mtp_layers
from slime.training.losses.scaling import counted_tokens
from slime.training.micro_batches import DataIterator
from slime.training.mtp import predicted_tokens
from slime.training.parallel import ParallelContext

ScaledLoss = Callable[..., tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]


class MtpTraining:
    """Trains the MTP layers, on every rank of the actor, also on those without such layers.

    The loss added to a step's is factor / D * sum over depths k of L_k (DeepSeek-V3, eqs 24 and 25). L_k is
    the mean of -log p over the predictions of depth k that count in the step, those of all ranks: it does not
    depend on how samples are packed or ranks laid out. No temperature divides the logits.
    """

    def __init__(self, config: BackendConfig, model: Sequence[DistributedDataParallel]) -> None:
        self._model = model
        self._depths = trained_mtp_layers(config.mtp)
        self._factor = config.mtp.mtp_loss_scaling_factor
        self._per_token = config.loss.calculate_per_token_loss
        self._overlapped = config.megatron.overlap_param_gather
        self._layers = layers_of(model[-1])

    @contextmanager
    def step(self, data: DataIterator, num_microbatches: int, context: ParallelContext) -> Iterator[None]:
        """Around the passes of an optimizer step over the next micro-batches. Collective."""
        self._share_embedding()
        if self._layers is not None:
            self._context = context
            self._count(data, num_microbatches)
        try:
            yield
        finally:
            if self._layers is not None:
                self._layers.embedding = None

    def _share_embedding(self) -> None:
        """Gives the last pipeline stage a copy of an embedding that it does not have."""
        chunks: list[GPTModel] = unwrap_model(list(self._model))
        tied = chunks[0].share_embeddings_and_output_weights
        if mpu.get_pipeline_model_parallel_world_size() == 1 or tied:
            return
        group = mpu.get_embedding_group(check_initialized=False)
        first = mpu.get_pipeline_model_parallel_first_rank()
        if mpu.is_pipeline_first_stage():
            if self._overlapped:
                self._model[0].start_param_sync(force_sync=True)
            dist.broadcast(chunks[0].embedding.word_embeddings.weight.detach(), first, group=group)
        elif self._layers is not None:
            self._layers.embedding = torch.empty_like(chunks[-1].output_layer.weight)
            dist.broadcast(self._layers.embedding, first, group=group)

    def _count(self, data: DataIterator, num_microbatches: int) -> None:
        """Finds what a micro-batch's sums have to be divided by."""
        masks = data.peek("loss_masks", num_microbatches)
        lengths = data.peek("total_lengths", num_microbatches)
        counts = [
            sum(map(predicted_tokens, masks, lengths, [depth] * num_microbatches))
            for depth in range(1, self._depths + 1)
        ]
        totals = torch.tensor(
            [*counts, sum(map(counted_tokens, masks))],
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        # Every rank of a context-parallel group counts whole sequences.
        dist.all_reduce(totals, group=self._context.dp_group)
        self._counts = totals[:-1].clamp(min=1)
        # What megatron-core divides the gradients of all ranks by, see `loss_function`.
        divisor = totals[-1] if self._per_token else num_microbatches * self._context.dp_size
        share = self._factor / self._depths * self._context.cp_size
        self._weights = (divisor * share / self._counts).float()
        self._sums = torch.zeros_like(self._counts)

    def with_loss(self, function: ScaledLoss, chunk: torch.nn.Module, batch: Mapping[str, Any]) -> ScaledLoss:
        """``function``, its loss with ours added; called after the forward pass of a chunk."""
        layers = layers_of(chunk)
        if layers is None:
            return function
        sums = layers.losses(unwrap_model(chunk), batch, self._context)
        self._sums += sums.detach()
        ours = (sums * self._weights).sum()

        def both(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            loss, normaliser, report = function(output)
            return loss + ours, normaliser, report

        return both

    def metrics(self) -> dict[str, float]:
        """Returns the losses of the last step: the mean of each depth, and of these, not yet times the
        factor.

        Collective over the ranks of the last pipeline stage; empty on others.
        """
        if self._layers is None:
            return {}
        dist.all_reduce(self._sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
        means = (self._sums / self._counts).tolist()
        of_depths = {f"mtp_{depth}_loss": mean for depth, mean in enumerate(means, start=1)}
        return {**of_depths, "mtp_loss": sum(means) / len(means)}


def layers_of(chunk: torch.nn.Module) -> MtpLayers | None:
    """Returns the MTP layers that a model chunk has."""
    return getattr(unwrap_model(chunk), "mtp", None)
