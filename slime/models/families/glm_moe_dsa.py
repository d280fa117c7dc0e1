"""GLM-5 and 5.2: DeepSeek-V3.2's layers, some of which may share the choice of the one before."""

from dataclasses import replace
from typing import Any

from slime.models.families import deepseek_v32
from slime.models.families.deepseek_v32 import sparse_shape
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape

_LETTERS = {"F": "full", "S": "shared"}


def _shape(config: HfConfig) -> ModelShape:
    filled = config.filled(num_key_value_heads=64, rms_norm_eps=1e-5)
    shape = sparse_shape(filled, interleaved=True, heads=32)
    assert shape.indexer is not None
    freq = _indexers(config, shape.num_layers)
    return replace(shape, indexer=replace(shape.indexer, dsa_indexer_freq=freq))


def _indexers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """1 for layers with an indexer: as named one by one, by a pattern, or every so many from an offset on."""
    name = next((name for name in ("indexer_types", "index_topk_pattern") if config.get(name)), None)
    if name is None:
        every, offset = config.size("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        if type(offset) is not int or offset < 0:
            raise config.wrong("index_skip_topk_offset", offset, "a number of layers")
        if offset == 0 and every > 1:
            wanted = f"1 or more, as the first layer has none before it to share at index_topk_freq {every}"
            raise config.wrong("index_skip_topk_offset", offset, wanted)
        return tuple(int(max(layer - offset + 1, 0) % every == 0) for layer in range(num_layers))
    kinds: Any = config.get(name)
    if isinstance(kinds, str):
        kinds = [_LETTERS.get(letter, letter) for letter in kinds]
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {*_LETTERS.values()}:
        raise config.wrong(name, kinds, f"full or shared for each of {num_layers} layers")
    if kinds[0] != "full":
        raise config.wrong(name, kinds, "full for the first layer, which has none before it")
    return tuple(int(kind == "full") for kind in kinds)


FAMILY = replace(deepseek_v32.FAMILY, shape=_shape)
