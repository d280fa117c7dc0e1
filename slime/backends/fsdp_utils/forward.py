"""Logits of a packed micro-batch, from any causal language model."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.attention import PackedAttention
from slime.backends.fsdp_utils.probe import REFERENCE, NotReproducible, Probe, alone, first_line, small_probe
from slime.training.context_parallel import row_multiple
from slime.training.inputs import PackedInputs
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs

logger = logging.getLogger(__name__)

Way = Literal["packed", "padded", "alone"]
_HOW = {"padded": "each sequence in a padded row of its own", "alone": "its sequences one by one"}


class PackedForward:
    """Computes a packed row such that no sequence sees another one.

    There are three ways, the fastest first: with ``flash_attention_2`` the row stays *packed*, and attention
    knows the sequences; *padded*, each sequence gets a row of its own, padded on the right; *alone*, the
    model gets one sequence after the other, which is right where logits depend on the length of a row. The
    first that gives the logits of each sequence alone is taken, which is measured on a small model of the
    architecture (`small_probe`). Where there is none, nothing is known, and sequences go one by one.

    Under context parallelism a rank computes its part of the row, which is always packed.

    Args:
        implementation: that of ``--attn-implementation``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        implementation: str,
        device: torch.device,
        context: ParallelContext | None = None,
    ) -> None:
        self._model, self._implementation, self._device = model, implementation, device
        self._context = context or ParallelContext()
        self._attention = PackedAttention(self._context.cp_group)
        self._way: Way = "alone"
        self._plain = REFERENCE if implementation == "flash_attention_2" else implementation

    @property
    def way(self) -> Way:
        return self._way

    def __call__(self, inputs: PackedInputs) -> torch.Tensor:
        """Logits [1, T / cp, V].

        Raises:
            ValueError: there is more to compute than the model or the way of computing takes.
        """
        inputs.refuse_media(type(self._model).__name__)
        if self._way == "packed" or self._context.cp_size > 1:
            return self._in_one_row(self._model, inputs)
        if inputs.placed is not None:
            raise ValueError(
                f"positions: {type(self._model).__name__} computes {_HOW[self._way]}, where it places tokens "
                "itself (wanted: a batch without)"
            )
        return (_one_by_one if self._way == "alone" else _padded)(self._model, inputs)

    def _in_one_row(self, model: PreTrainedModel, inputs: PackedInputs) -> torch.Tensor:
        self._attention.layout = inputs.layout
        places = inputs.layout.positions
        return _logits(model, inputs.tokens, position_ids=places if len(places) == 1 else places[:, None])

    def choose(self) -> "Outcome":
        """Collective. Takes the fastest way that gives the logits of each sequence alone.

        Raises:
            ValueError: none does; or that of context parallelism does not.
        """
        self._model.eval()
        try:
            self._model.set_attn_implementation(self._plain)
        except (ValueError, ImportError) as error:
            raise ValueError(self._refused_implementation(first_line(error))) from error
        found: list[Any] = [None] * dist.get_world_size()
        # All ranks of a context-parallel group share its sequences; else one rank can tell for all.
        tries = self._context.cp_size > 1 or dist.get_rank() == 0
        dist.all_gather_object(found, self._try() if tries else None)
        # What is wrong on one of them counts.
        outcome: Outcome = max(filter(None, found), key=lambda one: (one.refused, one.why))
        if outcome.refused:
            raise ValueError(outcome.refused)
        self._way = outcome.way
        if self._way == "packed":
            self._model.set_attn_implementation(self._attention.name)
        elif outcome.why and dist.get_rank() == 0:
            name = type(self._model).__name__
            logger.warning("%s computes %s: %s", name, _HOW[self._way], outcome.why)
        return outcome

    def _try(self) -> "Outcome":
        name, why = type(self._model).__name__, ""
        try:
            probe = small_probe(self._model, self._device, row_multiple(self._context, 1))
        except NotReproducible as error:
            return Outcome(refused=f"--train-backend fsdp: not with {name}: {error}")
        if isinstance(probe, str):
            why = f"no small model of it can be made to compare with ({probe})"
        else:
            for way, why_not in self._ways(probe).items():
                if not (reason := why_not()):
                    return Outcome(way, why)
                why = why or f"{way}, {reason}"
        if self._context.cp_size > 1:
            size = self._context.cp_size
            return Outcome(refused=f"--context-parallel-size {size}: not with {name}: {why} (wanted: 1)")
        if isinstance(probe, str):
            return Outcome("alone", why)
        return Outcome(refused=self._refused_implementation(why))

    def _refused_implementation(self, why: str) -> str:
        name = type(self._model).__name__
        return f"--attn-implementation {self._implementation}: not with {name}: {why} (wanted: {REFERENCE})"

    def _ways(self, probe: Probe) -> dict[Way, Callable[[], str]]:
        """The ways that there are, and for each what is wrong with it; empty if nothing is."""
        ways: dict[Way, Callable[[], str]] = {}
        if self._implementation == "flash_attention_2":
            ways["packed"] = lambda: self._why_not_packed(probe)
        if self._context.cp_size == 1:
            ways["padded"] = lambda: self._why_not(probe, _padded_rows)
            ways["alone"] = lambda: self._why_not(probe, _rows_alone)
        return ways

    def _why_not(self, probe: Probe, compute: Callable[[PreTrainedModel, Probe], torch.Tensor]) -> str:
        try:
            probe.model.set_attn_implementation(self._plain)
        except ValueError as error:
            return first_line(error)
        return probe.why_not(lambda: compute(probe.model, probe), probe.wanted)

    def _why_not_packed(self, probe: Probe) -> str:
        """Says why a model cannot be packed.

        Under context parallelism a collective of the ranks that share a row.
        """
        model = probe.model
        if not model._supports_attention_backend or model._is_stateful:
            return "its attention cannot be told where sequences end"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return "it takes no positions"
        model.set_attn_implementation(self._attention.name)
        inputs = _inputs(probe.rows, self._context)
        return probe.why_not(lambda: self._in_one_row(model, inputs)[0], inputs.split.take(probe.wanted))


@dataclass(frozen=True)
class Outcome:
    """How batches are computed, ``why`` not faster; or why they are not."""

    way: Way = "alone"
    why: str = ""
    refused: str = ""


def _logits(model: PreTrainedModel, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits


def _inputs(rows: Sequence[torch.Tensor], context: ParallelContext | None = None) -> PackedInputs:
    return PackedInputs.of([*map(SequenceInputs, rows)], context or ParallelContext())


def _padded(model: PreTrainedModel, inputs: PackedInputs) -> torch.Tensor:
    group, order = inputs.layout.one_group
    return _logits(model, group.gather(inputs.tokens[0])).flatten(0, 1).index_select(0, order)[None]


def _one_by_one(model: PreTrainedModel, inputs: PackedInputs) -> torch.Tensor:
    """Collective: each rank calls its model as often as that with the most sequences has to."""
    tokens = inputs.tokens
    rows = [row for row in tokens[0].split(list(inputs.split.lengths)) if len(row)]
    most = torch.tensor(len(rows), device=tokens.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    spare = [min(rows, key=len)] * (int(most) - len(rows))
    logits = torch.cat([alone(model, row) for row in [*rows, *spare]])
    # The spare rows stay in the graph: gradients are reduced as often on all ranks.
    return logits[None, : tokens.size(1)]


def _padded_rows(model: PreTrainedModel, probe: Probe) -> torch.Tensor:
    return _padded(model, _inputs(probe.rows))[0]


def _rows_alone(model: PreTrainedModel, probe: Probe) -> torch.Tensor:
    return torch.cat([alone(model, row) for row in probe.rows])
