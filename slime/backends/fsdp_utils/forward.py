"""Logits of a packed micro-batch, from any causal language model."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.attention import PackedAttention
from slime.backends.fsdp_utils.segments import Segments
from slime.training.context_parallel import RowSplit, row_multiple
from slime.training.packed_layout import PackedLayout
from slime.training.parallel import ParallelContext

logger = logging.getLogger(__name__)

# Of the spread of the logits: how far two ways to compute them may lie apart, by the format.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_PROBE = (5, 9, 2)


class PackedForward:
    """Computes a packed row such that no sequence sees another one.

    With ``flash_attention_2`` the row stays packed, and attention knows the sequences. Where the model mixes
    tokens in other ways too (a recurrence, a convolution, attention with features of its own), and with the
    other implementations, each sequence gets a row of its own, padded on the right: what is causal does not
    see the padding. Which of the two holds is measured once, after the weights are there.

    Under context parallelism a rank computes its part of the row, which is always packed.

    Args:
        implementation: that of ``--attn-implementation``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        implementation: str,
        dtype: torch.dtype,
        context: ParallelContext | None = None,
    ) -> None:
        self._model, self._dtype = model, dtype
        self._context = context or ParallelContext()
        self._attention = PackedAttention(self._context.cp_group)
        self._packed = False
        self._fallback = "eager" if implementation == "flash_attention_2" else implementation
        self._wants_packed = implementation == "flash_attention_2"

    @property
    def packed(self) -> bool:
        """Whether rows stay packed."""
        return self._packed

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Logits [1, T / cp, V] of a micro-batch of `packed_micro_batch`."""
        if self._context.cp_size > 1:
            return self._in_part(batch["tokens"], batch["segment_lengths"])
        segments = Segments(batch["segment_lengths"], batch["tokens"].device)
        return self._in_one_row(batch["tokens"], segments) if self._packed else self._padded(batch, segments)

    def _in_one_row(self, tokens: torch.Tensor, segments: Segments) -> torch.Tensor:
        self._attention.segments = segments
        return self._model(input_ids=tokens, position_ids=segments.positions[None], use_cache=False).logits

    def _in_part(self, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Of this rank's rows of a row of segments."""
        layout = PackedLayout.of_split(RowSplit.of(lengths, self._context), tokens.device)
        self._attention.split = layout
        return self._model(input_ids=tokens, position_ids=layout.positions[None], use_cache=False).logits

    def _padded(self, batch: Mapping[str, Any], segments: Segments) -> torch.Tensor:
        rows = segments.whole.gather(batch["tokens"][0])
        return segments.packed_whole(self._model(input_ids=rows, use_cache=False).logits)[None]

    def choose(self) -> None:
        """Collective. Takes the packed way if it gives the same logits as the padded one.

        Raises:
            ValueError: it does not, and there is no other under context parallelism.
        """
        self._model.set_attn_implementation(self._fallback)
        self._packed = False
        reason = self._why_not_packed() if self._wants_packed else ""
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        refused = next(filter(None, reasons), "")
        self._packed = self._wants_packed and not refused
        self._model.set_attn_implementation(self._attention.name if self._packed else self._fallback)
        name = type(self._model).__name__
        if refused and self._context.cp_size > 1:
            size = self._context.cp_size
            raise ValueError(f"--context-parallel-size {size}: not with {name}: {refused} (wanted: 1)")
        if refused and dist.get_rank() == 0:
            logger.warning("%s computes each sequence in a padded row of its own: %s", name, refused)

    @torch.no_grad()
    def _why_not_packed(self) -> str:
        """Empty if packed rows are right. Every rank makes the same calls of the model."""
        model = self._model
        if not model._supports_attention_backend or model._is_stateful:
            return "its attention cannot be told where sequences end"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return "it takes no positions"
        model.eval()
        device = next(model.parameters()).device
        size = model.config.get_text_config().vocab_size
        multiple = row_multiple(self._context, 1)
        lengths = [-(-length // multiple) * multiple for length in _PROBE]
        tokens = torch.arange(sum(lengths), device=device)[None] * 7 % size
        batch = {"tokens": tokens, "segment_lengths": lengths}
        segments = Segments(lengths, device)
        padded = self._padded(batch, segments)
        try:
            model.set_attn_implementation(self._attention.name)
            if self._context.cp_size > 1:
                split = RowSplit.of(lengths, self._context)
                packed = self._in_part(split.take(tokens[0])[None], lengths)
                padded = split.take(padded[0])[None]
            else:
                packed = self._in_one_row(tokens, segments)
        except (RuntimeError, ValueError, TypeError) as error:
            for module in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
                module.reshard()  # the layer that failed has its weights gathered
            return str(error).splitlines()[0]
        gap = float((packed - padded).abs().max() / padded.float().std())
        return "" if gap < _TOLERANCE[self._dtype] else f"packed logits differ by {gap:.2g} of their spread"
