"""Format and shape of what a checkpoint has in the place of its weights, by its headers; needs no torch."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from slime.models.checkpoint.quantization import MX_GROUP, Quantization

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = ("_scale_inv", "_scale")
_PACKED, _SCALE, _SIZES = "_packed", "_scale", "_shape"
_BLOCKS, _POWERS = "_blocks", "_scales"
_MXFP8_POWERS = "_scale_inv"
_INT4_PER_WORD, _MXFP4_BYTES = 8, 16  # numbers in 32 bits; bytes of a group
Sizes = tuple[int, ...]


class Form(NamedTuple):
    """What a tensor may be."""

    sizes: Sizes
    dtypes: frozenset[str]


class StoredForms:
    """Knows what each tensor of a checkpoint may be.

    Args:
        shape_of: the shape of a weight by its name; None where it is not known.
        quantization: what config.json says.
        names: of all its tensors.
    """

    def __init__(
        self,
        shape_of: Callable[[str], Sizes | None],
        quantization: Quantization | None,
        names: Collection[str],
    ) -> None:
        self._shape_of, self._quantization, self._names = shape_of, quantization, names

    def has_scale(self, name: str) -> bool:
        """Whether float8 numbers have a scale beside them, and config.json speaks of it."""
        return self._quantization is not None and any(name + scale in self._names for scale in _SCALES)

    def of(self, name: str) -> Form | None:
        """Returns what a tensor may be; None where config.json does not decide it."""
        stored = self._quantization
        if (plain := self._shape_of(name)) is not None:
            return Form(plain, FLOATS | EIGHT_BITS if stored and stored.is_float8 else FLOATS)
        forms = {"fp8": self._fp8_scale, "int4": self._int4, "mxfp4": self._mxfp4, "mxfp8": self._mxfp8_scale}
        return forms[stored.kind](name) if stored else None

    def _matrix(self, name: str, suffix: str, rank: int) -> Sizes | None:
        """The shape of the weight beside which a tensor with this suffix stands."""
        sizes = self._shape_of(name.removesuffix(suffix)) if name.endswith(suffix) else None
        return sizes if sizes is not None and len(sizes) == rank else None

    def _fp8_scale(self, name: str) -> Form | None:
        """Knows the scales of blocks; those of rows or of a whole tensor have several shapes."""
        block = self._quantization.block if self._quantization else None
        sizes = next((found for suffix in _SCALES if (found := self._matrix(name, suffix, 2))), None)
        if block is None or sizes is None:
            return None
        return Form((-(-sizes[0] // block[0]), -(-sizes[1] // block[1])), FLOATS | {"F8_E8M0"})

    def _mxfp8_scale(self, name: str) -> Form | None:
        if sizes := self._matrix(name, _MXFP8_POWERS, 2):
            return Form((sizes[0], sizes[1] // MX_GROUP), frozenset({"U8"}))
        return None

    def _int4(self, name: str) -> Form | None:
        group = self._quantization.group if self._quantization else None
        if sizes := self._matrix(name, _PACKED, 2):
            return Form((sizes[0], -(-sizes[1] // _INT4_PER_WORD)), frozenset({"I32"}))
        if sizes := self._matrix(name, _SCALE, 2):
            return Form((sizes[0], -(-sizes[1] // (group or sizes[1]))), FLOATS)
        return Form((2,), frozenset({"I32", "I64"})) if self._matrix(name, _SIZES, 2) else None

    def _mxfp4(self, name: str) -> Form | None:
        """Knows the matrices of a layer's experts, which are stored transposed, groups of inputs last."""
        for suffix, rest in ((_BLOCKS, (_MXFP4_BYTES,)), (_POWERS, ())):
            if sizes := self._matrix(name, suffix, 3):
                experts, inputs, outputs = sizes
                return Form((experts, outputs, inputs // MX_GROUP, *rest), frozenset({"U8"}))
        return None
