"""The memory of an engine's GPU: SGLang gives weights and KV cache a fixed part of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from slime.check.activations import longest_sample
from slime.check.parameters import Kind, whole_model
from slime.config.memory import MemoryConfig
from slime.config.run import options_of
from slime.config.served_models import PLACEHOLDER, ServedModelConfig, ServerGroupConfig
from slime.models import FAMILIES, read_shape
from slime.models.checkpoint.quantization import read_quantization
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape

_FRACTION = 0.85
"""What is taken where ``--sglang-mem-fraction-static`` is not given: SGLang then decides by the GPU."""
_SIZES = {"float32": 4, "float": 4}


@dataclass(frozen=True)
class EngineNeeds:
    """One kind of engine of a served model.

    Attributes:
        gpus, engines: of one engine, and how many such engines there are.
        static: bytes of a GPU that weights and cache share.
        weights: bytes of a GPU.
        token: bytes of a GPU that one token takes in the cache.
        longest: tokens that a sample may have; None where no flag says.
    """

    model: str
    gpus: int
    engines: int
    static: int
    weights: int
    token: float
    longest: int | None

    @property
    def cache(self) -> int:
        """Bytes of a GPU that are left to the cache; below 0 where the weights do not fit."""
        return self.static - self.weights

    @property
    def tokens(self) -> int:
        """The number of tokens that the cache of an engine holds."""
        return max(0, int(self.cache / self.token)) if self.token else 0


def engine_needs(
    config: MemoryConfig, gpu_bytes: int, trained: Mapping[Kind, int] | None = None
) -> list[EngineNeeds]:
    """Returns the needs of the engines that serve the trained model; others have a config of their own.

    Args:
        trained: the parameters of that model, where they are known already.
    """
    if config.model.model_type not in FAMILIES:
        return []
    whole = whole_model(config) if trained is None else trained
    return [
        _needs(config, model, group, gpu_bytes, whole)
        for model in config.engines.served_models
        if model.model_path == config.hf_checkpoint.hf_checkpoint
        for group in model.server_groups
        if group.worker_type != PLACEHOLDER
    ]


def _needs(
    config: MemoryConfig,
    model: ServedModelConfig,
    group: ServerGroupConfig,
    gpu_bytes: int,
    whole: Mapping[Kind, int],
) -> EngineNeeds:
    given = options_of(config, "sglang_") | group.overrides
    size = _SIZES.get(str(given.get("dtype")), 2)
    kept = 1 if str(given.get("kv_cache_dtype")).startswith("fp8") else size
    stages = int(given.get("pp_size") or 1)
    fraction = given.get("mem_fraction_static")
    return EngineNeeds(
        model=model.name,
        gpus=group.size,
        engines=group.num_engines,
        static=int((_FRACTION if fraction is None else float(fraction)) * gpu_bytes),
        weights=_weights(config.hf_checkpoint.hf_checkpoint, size, whole) // group.size,
        token=_cached(read_shape(config.hf_checkpoint.hf_checkpoint), group.size // stages) * kept / stages,
        longest=longest_sample(config.rollout),
    )


def _weights(path: str, size: int, whole: Mapping[Kind, int]) -> int:
    """Bytes of the whole model. In quantised checkpoints float8 (MXFP8 too) is all but embedding and head,
    numbers of 4 bits are the experts.

    Args:
        size: of an element that is not quantised.
    """
    each = dict.fromkeys(whole, float(size))
    stored = read_quantization(HfConfig.read(path))
    if stored is not None:
        of_scale = (1 if stored.power_of_two else size) / stored.group if stored.group else 0
        number = 1.0 if stored.is_float8 else 0.5
        each |= dict.fromkeys(("dense", "experts") if stored.is_float8 else ("experts",), number + of_scale)
    return int(sum(each[kind] * elements for kind, elements in whole.items()))


def _cached(shape: ModelShape, tp: int) -> int:
    """Elements of a token in the caches of all layers, on one GPU; latent vectors are on each of them.

    Delta nets have a state of a sequence in the place of its tokens.
    """
    layers = shape.num_layers - (sum(shape.linear.linear_attention_freq) if shape.linear else 0)
    if shape.latent is not None:
        latents = layers * (shape.latent.kv_lora_rank + shape.latent.qk_pos_emb_head_dim)
        indexer = shape.indexer
        return latents + (sum(indexer.dsa_indexer_freq) * indexer.dsa_indexer_head_dim if indexer else 0)
    return layers * 2 * max(1, shape.num_query_groups // tp) * shape.kv_channels
