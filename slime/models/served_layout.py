"""How SGLang's tensor-parallel ranks hold the weights of decoders in the manner of Llama.

Read off SGLang 0.5.23: projections that are computed together are one tensor, of which each rank has its part
of each; key-value heads that are fewer than ranks are on several; the vocabulary is padded.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.config.model import DecoderShape, MoeShape
from slime.models.blocks import Area, Block, matrix_size
from slime.models.families import family_of

_PADDED_TO = 64
_JOINED = {".q_proj.": ".qkv_proj.", ".gate_proj.": ".gate_up_proj."}


@dataclass(frozen=True)
class ServedTensor:
    """A parameter of an engine's rank.

    Attributes:
        name: that the engine has for it.
        blocks: what it is made of.
        padding: rows at its end that are zero.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    padding: int = 0

    def require_full(self) -> None:
        """
        Raises:
            ValueError: its blocks leave a gap, or lie over one another.
        """
        rows, columns = matrix_size(self.shape)
        end = 0
        for block in sorted(self.blocks, key=lambda block: block.row):
            if (
                block.row != end
                or block.column
                or block.area.columns.stop - block.area.columns.start != columns
            ):
                raise ValueError(
                    f"engine tensor {self.name!r}: {block.name} lies at row {block.row}, column "
                    f"{block.column} (wanted: row {end}, all {columns} columns)"
                )
            end += len(block.area.rows)
        if end + self.padding != rows:
            raise ValueError(
                f"engine tensor {self.name!r}: {end} rows and {self.padding} of padding (wanted: {rows})"
            )


def served_layout(shape: DecoderShape, moe: MoeShape | None, rank: int, size: int) -> list[ServedTensor]:
    """The parameters of a rank, in the order of megatron-core's.

    Args:
        moe: of the layers with experts, if there are any.
        size: ranks of an engine.

    Raises:
        ValueError: SGLang's layout of such a model is not known here, or the ranks do not divide it.
    """
    family = family_of(shape.model_type)
    if (
        not family.like_llama
        or getattr(shape, "add_output_bias", False)
        or getattr(shape, "add_mlp_bias", False)
    ):
        raise ValueError(
            f"model_type {shape.model_type}: how an engine's ranks hold its weights is not known"
        )
    _require_divided(shape, moe, size)
    return list(_Layout(shape, moe, rank, size).tensors())


def _require_divided(shape: DecoderShape, moe: MoeShape | None, size: int) -> None:
    sizes = {"num_attention_heads": shape.num_attention_heads, "ffn_hidden_size": shape.ffn_hidden_size}
    if moe is not None:
        sizes["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size
    for name, found in sizes.items():
        if found % size:
            raise ValueError(f"engines of {size} ranks: do not divide {name} {found} (config.json)")
    groups = shape.num_query_groups
    if groups % size and size % groups:
        raise ValueError(
            f"engines of {size} ranks: neither divide num_query_groups {groups} (config.json) nor are a "
            "multiple of it"
        )


class _Layout:
    def __init__(self, shape: DecoderShape, moe: MoeShape | None, rank: int, size: int) -> None:
        self._shape, self._moe, self._rank, self._size = shape, moe, rank, size
        self._rules = family_of(shape.model_type).weights

    def tensors(self) -> Iterator[ServedTensor]:
        yield self._vocabulary("embedding.word_embeddings.weight")
        for layer in range(self._shape.num_layers):
            prefix = f"decoder.layers.{layer}."
            yield self._norm(prefix + "input_layernorm.weight", self._shape.hidden_size)
            yield from self._attention(prefix + "self_attention.")
            yield self._norm(prefix + "pre_mlp_layernorm.weight", self._shape.hidden_size)
            if self._moe is not None and self._moe.moe_layer_freq[layer]:
                yield from self._experts(prefix + "mlp.", self._moe)
            else:
                yield from self._mlp(prefix + "mlp.")
        yield self._norm("decoder.final_layernorm.weight", self._shape.hidden_size)
        if self._shape.untie_embeddings_and_output_weights:
            yield self._vocabulary("output_layer.weight")

    def _names(self, parameter: str) -> tuple[str, ...]:
        return self._rules.rule_for(parameter, self._shape.num_layers).hf_names

    def _part(self, of: int) -> range:
        part = of // self._size
        return range(self._rank * part, (self._rank + 1) * part)

    def _vocabulary(self, parameter: str) -> ServedTensor:
        rows, width, (name,) = self._shape.vocab_size, self._shape.hidden_size, self._names(parameter)
        padded = _rounded_up(rows, _PADDED_TO)
        if padded % self._size:
            padded = _rounded_up(rows, _PADDED_TO * self._size)
        part = self._part(padded)
        held = range(min(part.start, rows), min(part.stop, rows))
        blocks = (Block(name, Area(held, range(width)), 0),) if held else ()
        return ServedTensor(name, (len(part), width), blocks, len(part) - len(held))

    def _norm(self, parameter: str, width: int) -> ServedTensor:
        (name,) = self._names(parameter)
        return ServedTensor(name, (width,), (Block(name, Area(range(width), range(1)), 0),))

    def _attention(self, prefix: str) -> Iterator[ServedTensor]:
        shape = self._shape
        head, heads, groups = shape.kv_channels, shape.num_attention_heads, shape.num_query_groups
        if groups >= self._size:
            keys = self._part(groups * head)
        else:
            group = self._rank // (self._size // groups)
            keys = range(group * head, (group + 1) * head)
        yield self._columns(prefix + "linear_proj.weight", shape.hidden_size, heads * head)
        rows = [self._part(heads * head), keys, keys]
        yield self._rows(prefix + "linear_qkv.weight", rows, shape.hidden_size)
        if shape.add_qkv_bias:
            yield self._rows(prefix + "linear_qkv.bias", rows, None)
        if shape.qk_layernorm:
            yield self._norm(prefix + "q_layernorm.weight", head)
            yield self._norm(prefix + "k_layernorm.weight", head)

    def _mlp(self, prefix: str) -> Iterator[ServedTensor]:
        width, hidden = self._shape.ffn_hidden_size, self._shape.hidden_size
        yield self._rows(prefix + "linear_fc1.weight", [self._part(width)] * 2, hidden)
        yield self._columns(prefix + "linear_fc2.weight", hidden, width)

    def _rows(self, parameter: str, parts: Sequence[range], width: int | None) -> ServedTensor:
        """Parts of the rows of several tensors, one below the other; vectors without a ``width``."""
        names, columns = self._names(parameter), range(1 if width is None else width)
        blocks, row = [], 0
        for name, rows in zip(names, parts, strict=True):
            blocks.append(Block(name, Area(rows, columns), row))
            row += len(rows)
        shape = (row,) if width is None else (row, width)
        return ServedTensor(_joined(names[0]), shape, tuple(blocks))

    def _columns(self, parameter: str, rows: int, of: int) -> ServedTensor:
        (name,), columns = self._names(parameter), self._part(of)
        return ServedTensor(name, (rows, len(columns)), (Block(name, Area(range(rows), columns), 0),))

    def _experts(self, prefix: str, moe: MoeShape) -> Iterator[ServedTensor]:
        hidden = self._shape.hidden_size
        (router,) = self._names(prefix + "router.weight")
        area = Area(range(moe.num_experts), range(hidden))
        yield ServedTensor(router, (moe.num_experts, hidden), (Block(router, area, 0),))
        first, second = [], []
        for number in range(moe.num_experts):
            expert = f"{prefix}experts.local_experts.{number}."
            first.append(
                self._rows(expert + "linear_fc1.weight", [self._part(moe.moe_ffn_hidden_size)] * 2, hidden)
            )
            second.append(self._columns(expert + "linear_fc2.weight", hidden, moe.moe_ffn_hidden_size))
        yield _stacked(first, "w13_weight")
        yield _stacked(second, "w2_weight")


def _stacked(experts: Sequence[ServedTensor], name: str) -> ServedTensor:
    """One tensor for the same one of all experts of a layer."""
    rows = experts[0].shape[0]
    blocks = tuple(
        block._replace(row=block.row + number * rows)
        for number, one in enumerate(experts)
        for block in one.blocks
    )
    stem = re.sub(r"\.experts\.0\..*", ".experts.", experts[0].name)
    return ServedTensor(stem + name, (len(experts), *experts[0].shape), blocks)


def _joined(name: str) -> str:
    """What the engine calls a tensor whose first part has this name."""
    for part, whole in _JOINED.items():
        name = name.replace(part, whole)
    return name


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
