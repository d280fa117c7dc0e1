"""How megatron-core parameters correspond to Hugging Face tensors: one kind of table for both directions.

A rule belongs to one megatron-core parameter and names the HF tensors that it holds. ``layout`` says which of
their rows make up the full parameter (before tensor-parallel sharding), ``split`` gives the tensors back.

Names are global and without wrappers: ``decoder.layers.<layer of the whole model>.mlp.linear_fc1.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from slime.config.model import ModelConfig
from slime.models.weight_prefix import TEXT_ONLY, WeightPrefix

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """One tensor of several, one after the other along ``dim``."""
    import torch  # takes a second, which whoever reads config.json alone need not wait for

    return torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows of a full parameter: ``count`` rows of tensor ``source`` from ``start`` on.

    Without a ``source`` they are zeros.
    """

    source: int | None
    start: int
    count: int


@dataclass(frozen=True)
class Rule:
    """One to one."""

    hf_names: tuple[str, ...]

    @property
    def expert(self) -> int | None:
        """Whose part of the HF tensors it is about, where they hold those of all experts of a layer."""
        return None

    def layout(self, rows: Sequence[int], shape: ModelConfig) -> list[Segment]:
        """What the rows of the full parameter are, in order; ``rows`` counts those of each HF tensor."""
        return [Segment(0, 0, rows[0])]

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        """The full parameter; a rule that rows do not describe overrides this, and is read whole."""
        rest = tensors[0].shape[1:]
        parts = [
            tensors[0].new_zeros(part.count, *rest)
            if part.source is None
            else tensors[part.source][part.start : part.start + part.count]
            for part in self.layout([len(tensor) for tensor in tensors], shape)
        ]
        return parts[0] if len(parts) == 1 else joined(parts)

    def ranges(self, rows: int, rank: int, size: int) -> list[range]:
        """The rows of a full parameter of so many that tensor-parallel rank ``rank`` of ``size`` holds."""
        part = -(-rows // size)
        return [range(min(rank * part, rows), min((rank + 1) * part, rows))]

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        """The HF tensors that a full parameter holds, without vocabulary padding; views where possible."""
        return [param]

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        return joined(shards, dim)

    def under(self, prefix: str) -> Self:
        """Returns the rule with ``prefix`` before its HF names."""
        return replace(self, hf_names=tuple(prefix + name for name in self.hf_names))


@dataclass(frozen=True)
class VocabRule(Rule):
    """Embedding and head: megatron-core's have padding rows at the end, which are zero here."""

    def layout(self, rows: Sequence[int], shape: ModelConfig) -> list[Segment]:
        return [Segment(0, 0, rows[0]), Segment(None, 0, max(0, shape.padded_vocab_size - rows[0]))]

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return [param[: shape.vocab_size]]


@dataclass(frozen=True)
class QkvRule(Rule):
    """Query, key and value in one; per query group the rows are [its query heads, its key, its value]."""

    def layout(self, rows: Sequence[int], shape: ModelConfig) -> list[Segment]:
        counts = [count // shape.num_query_groups for count in rows]
        return [
            Segment(source, group * count, count)
            for group in range(shape.num_query_groups)
            for source, count in enumerate(counts)
        ]

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        rest, head = param.shape[1:], shape.kv_channels
        grouped = param.reshape(shape.num_query_groups, -1, *rest)
        query_rows = shape.num_attention_heads // shape.num_query_groups * head
        return [part.reshape(-1, *rest) for part in grouped.split([query_rows, head, head], dim=1)]


@dataclass(frozen=True)
class GatedQkvRule(Rule):
    """The rule of attention where the projection of queries has, for each head, its query and then its output
    gate.

    Per query group the rows are [its query heads, their gates, its key, its value].
    """

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        rest, groups = tensors[0].shape[1:], shape.num_query_groups
        heads = tensors[0].reshape(groups, -1, 2, shape.kv_channels, *rest)
        parts = [heads[:, :, 0], heads[:, :, 1], *tensors[1:]]
        return joined([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        rest, groups, head = param.shape[1:], shape.num_query_groups, shape.kv_channels
        rows = shape.num_attention_heads // groups * head
        parts = param.reshape(groups, -1, *rest).split([rows, rows, head, head], dim=1)
        query, gate = (part.reshape(shape.num_attention_heads, 1, head, *rest) for part in parts[:2])
        both = joined([query, gate], dim=1)
        return [part.reshape(-1, *rest) for part in (both, *parts[2:])]


@dataclass(frozen=True)
class GateUpRule(Rule):
    """Gate over up. Each tensor-parallel rank holds its part of both, so each is sharded on its own."""

    def layout(self, rows: Sequence[int], shape: ModelConfig) -> list[Segment]:
        return [Segment(source, 0, count) for source, count in enumerate(rows)]

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return list(param.chunk(2))

    def ranges(self, rows: int, rank: int, size: int) -> list[range]:
        half = rows // 2
        (part,) = super().ranges(half, rank, size)
        return [part, range(half + part.start, half + part.stop)]

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        halves = [shard.chunk(2, dim) for shard in shards]
        return joined([gate for gate, _ in halves] + [up for _, up in halves], dim)


@dataclass(frozen=True)
class FusedGateUpRule(GateUpRule):
    """Gate over up, as in the checkpoint."""

    def layout(self, rows: Sequence[int], shape: ModelConfig) -> list[Segment]:
        return [Segment(0, 0, rows[0])]

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return [param]


@dataclass(frozen=True)
class StackedRule(Rule):
    """The rule of one expert, for its part of tensors [experts, ...]."""

    of_one: Rule
    number: int

    @property
    def expert(self) -> int:
        return self.number

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        return self.of_one.merge(tensors, shape)

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return self.of_one.split(param, shape)

    def ranges(self, rows: int, rank: int, size: int) -> list[range]:
        return self.of_one.ranges(rows, rank, size)

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        return self.of_one.unshard(shards, dim)


@dataclass(frozen=True)
class ExpertRules:
    """What a layer has in the place of its dense MLP.

    Attributes:
        of_layer: by the parameter's name within the layer.
        of_expert: by its name within an expert.
        prefix: what HF puts before the names of an expert, {} standing for its number.
        stacked: whether HF has one tensor for all experts of a layer, whose first dimension counts them.
    """

    of_layer: Mapping[str, Rule]
    of_expert: Mapping[str, Rule]
    prefix: str
    stacked: bool = False

    def names(self, num_experts: int) -> list[str]:
        """Returns the names of all parameters within a layer."""
        experts = [
            f"mlp.experts.local_experts.{i}.{name}" for i in range(num_experts) for name in self.of_expert
        ]
        return [*self.of_layer, *experts]

    def rule_for(self, name: str) -> Rule | None:
        """The rule of a name within a layer, its HF names complete but for the layer's prefix."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self.of_layer.get(name)
        rule = self.of_expert.get(match[2])
        if rule is None:
            return None
        named = rule.under(self.prefix.format(match[1]))
        return StackedRule(named.hf_names, named, int(match[1])) if self.stacked else named


@dataclass(frozen=True)
class LayerKind:
    """What layers of a kind have that others have not.

    Attributes:
        marked: has a 1 for each such layer; None or empty without any.
        rules: by the parameter's name within the layer.
        instead_of: what the names begin with that they take the place of; empty for none.
    """

    marked: Callable[[ModelConfig], Sequence[int] | None]
    rules: Mapping[str, Rule]
    instead_of: str = ""

    def names(self, others: Sequence[str]) -> list[str]:
        """The names within such a layer, which had these without."""
        kept = [name for name in others if not (self.instead_of and name.startswith(self.instead_of))]
        return [*kept, *self.rules]


class MtpNaming(Protocol):
    """The rules of MTP layers: `slime.models.mtp.MtpRules`."""

    def rule_for(self, name: str, num_layers: int, inner: Callable[[str], Rule | None]) -> Rule | None: ...
    def names(self, layers: int, in_layer: Sequence[str]) -> list[str]: ...


@dataclass(frozen=True)
class WeightMap:
    """The rules of a family.

    Attributes:
        of_model, of_layer: by the parameter's name, that within a layer for the latter.
        layer_prefix: what HF puts before the names of a layer, {} standing for its number.
        absent: names that models of a shape do not have.
        experts: what the layers that `ModelConfig.moe_layer_freq` marks have instead of the names ``mlp.*``.
        kinds: of layers that have something else than ``of_layer``.
        untrained: whether a tensor of checkpoints of so many layers belongs to parts that are not trained, or
            only if flags say so, as MTP layers or read images. Exports carry
            over what was not.
        mtp: of the former; None where they are never trained.
        prefix: of the language model's tensors in the checkpoint.
    """

    of_model: Mapping[str, Rule]
    layer_prefix: str
    of_layer: Mapping[str, Rule]
    absent: Callable[[ModelConfig], Collection[str]]
    experts: ExpertRules | None = None
    kinds: tuple[LayerKind, ...] = ()
    untrained: Callable[[str, int], bool] = lambda name, num_layers: False
    mtp: MtpNaming | None = None
    prefix: WeightPrefix = TEXT_ONLY

    def rule_for(self, name: str, num_layers: int = 0) -> Rule:
        """The rule of a global parameter name, its HF names complete.

        Args:
            num_layers: of the decoder, from which names of MTP layers may count on.

        Raises:
            ValueError: no rule covers the parameter.
        """
        match = _LAYER.fullmatch(name)
        rule = self._in_layer(match[2]) if match else self.of_model.get(name)
        if rule is None and self.mtp is not None:
            rule = self.mtp.rule_for(name, num_layers, self._in_layer)
        rule = _known(rule, name)
        rule = rule.under(self.layer_prefix.format(match[1])) if match else rule
        return replace(rule, hf_names=tuple(map(self.prefix.outer, rule.hf_names)))

    def _in_layer(self, name: str) -> Rule | None:
        tables = (self.of_layer, *(kind.rules for kind in self.kinds))
        rule = next((table[name] for table in tables if name in table), None)
        return rule or (self.experts.rule_for(name) if self.experts else None)

    def names_beside_experts(self, shape: ModelConfig, layer: int) -> list[str]:
        """The names within a layer, as if its MLP were dense."""
        names = [*self.of_layer]
        for kind in self.kinds:
            marked = kind.marked(shape)
            names = kind.names(names) if marked and marked[layer] else names
        return names

    def _names_in_layer(self, shape: ModelConfig, layer: int) -> list[str]:
        names = self.names_beside_experts(shape, layer)
        if self.experts and shape.moe_layer_freq[layer]:
            dense = [name for name in names if not name.startswith("mlp.")]
            names = dense + self.experts.names(shape.num_experts)
        return names

    def hf_names(self, shape: ModelConfig, mtp_layers: int = 0) -> set[str]:
        """The names of all tensors of a model, and of so many of its MTP layers."""
        absent = self.absent(shape)
        names = [name for name in self.of_model if name not in absent]
        if self.mtp is not None:
            inner = [name for name in self._names_in_layer(shape, shape.num_layers - 1) if name not in absent]
            names += self.mtp.names(mtp_layers, inner)
        found = {hf for name in names for hf in self.rule_for(name, shape.num_layers).hf_names}
        in_layer: dict[str, tuple[str, ...]] = {}  # as experts have ten thousand names in each layer
        for layer in range(shape.num_layers):
            prefix = self.prefix.outer(self.layer_prefix.format(layer))
            for name in self._names_in_layer(shape, layer):
                if name not in absent:
                    if name not in in_layer:
                        in_layer[name] = _known(self._in_layer(name), name).hf_names
                    found.update(prefix + hf for hf in in_layer[name])
        return found


def _known(rule: Rule | None, name: str) -> Rule:
    if rule is None:
        raise ValueError(f"parameter {name!r}: no Hugging Face counterpart is known")
    return rule
