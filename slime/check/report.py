"""A run on paper: what its GPUs hold, and what of it does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.check.engines import EngineNeeds, engine_needs
from slime.check.needs import RoleNeeds, reserve, trained_roles
from slime.check.snapshots import snapshots_lack_room
from slime.config.check import CheckConfig
from slime.config.cluster import ClusterConfig
from slime.config.memory import MemoryConfig
from slime.utils.accelerator import gpu_memory

GIB = 2**30
_USUAL_GPU = 80.0
"""GiB of a GPU where none is here and ``--check-gpu-memory-gb`` is not given."""


@dataclass(frozen=True)
class Report:
    """What `page` shows.

    Attributes:
        gpu: bytes of one GPU.
        gpu_is_assumed: neither a flag nor a GPU of this machine says how many.
        misfits: what does not fit into it, one line each.
    """

    config: MemoryConfig
    gpu: int
    gpu_is_assumed: bool
    roles: Sequence[RoleNeeds]
    engines: Sequence[EngineNeeds]
    misfits: Sequence[str]


def report(config: MemoryConfig) -> Report:
    """Makes the report of flags that do not contradict each other; reads config.json and nothing else."""
    known = known_gpu_bytes(config.check)
    gpu = known or int(_USUAL_GPU * GIB)
    roles = trained_roles(config)
    engines = engine_needs(config, gpu, roles[0].whole if roles else None)
    return Report(config, gpu, known is None, roles, engines, list(_misfits(config, gpu, roles, engines)))


def known_gpu_bytes(config: CheckConfig) -> int | None:
    """Returns the memory of a GPU as the flag has it, else of the one here; None if there is none."""
    if config.check_gpu_memory_gb is not None:
        return int(config.check_gpu_memory_gb * GIB)
    return gpu_memory()


def _misfits(
    config: MemoryConfig, gpu: int, roles: Sequence[RoleNeeds], engines: Sequence[EngineNeeds]
) -> Iterator[str]:
    size = f"{gpu / GIB:.0f} GiB"
    beside = _beside_training(config.cluster, engines)
    for role in roles:
        stage = role.stages[role.fullest]
        wanted = stage.total + reserve(gpu) + beside
        if wanted > gpu:
            ranks = role.layout.ranks(role.fullest)
            where = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
            stays = f", {beside / GIB:.1f} of them for engines that stay" if beside else ""
            yield (
                f"{role.role}: {where} need {wanted / GIB:.1f} GiB{stays} (found: a GPU of {size}; wanted: "
                "more GPUs or a larger --tensor-model-parallel-size, a smaller --max-tokens-per-gpu, "
                "or --recompute-granularity full)"
            )
    for engine in engines:
        yield from _bad_engine(engine, size)
    yield from _both_at_once(config, gpu, roles, engines)
    if reason := snapshots_lack_room(config, roles):
        yield reason


def _beside_training(config: ClusterConfig, engines: Sequence[EngineNeeds]) -> int:
    """Bytes of engines that do not make room for the trainer."""
    if not config.colocate or config.offload_rollout:
        return 0
    return max((engine.static for engine in engines), default=0)


def _bad_engine(engine: EngineNeeds, size: str) -> Iterator[str]:
    flags = "--sglang-mem-fraction-static or --rollout-num-gpus-per-engine"
    if engine.cache <= 0:
        yield (
            f"engines of {engine.gpus} GPUs: the weights take {engine.weights / GIB:.1f} GiB of each, more "
            f"than the {engine.static / GIB:.1f} GiB for weights and KV cache (found: a GPU of {size}; "
            f"wanted: a larger {flags})"
        )
    elif engine.longest is not None and engine.tokens < engine.longest:
        yield (
            f"engines of {engine.gpus} GPUs: their KV cache holds {engine.tokens} tokens, and a sample may "
            f"have {engine.longest} (found: a GPU of {size}; wanted: a larger {flags})"
        )


def _both_at_once(
    config: MemoryConfig, gpu: int, roles: Sequence[RoleNeeds], engines: Sequence[EngineNeeds]
) -> Iterator[str]:
    """Yields what a shared GPU lacks while weights are sent: room for both sides', or for one that stays."""
    if not (config.cluster.colocate and roles and engines):
        return
    leaves = config.cluster.offload_train or config.weight_sync.release_train
    actor = roles[0].stages[roles[0].fullest].states
    trainer = actor.weights
    if not leaves:
        trainer += actor.gradients + actor.optimizer
        engine = max(engine.static for engine in engines)
    else:
        engine = max(engine.weights for engine in engines)
    wanted = trainer + engine + reserve(gpu)
    if wanted > gpu:
        what = "while weights are sent" if leaves else "as the trainer stays (--no-offload-train)"
        yield (
            f"GPUs shared by trainer and engines need {wanted / GIB:.1f} GiB {what} "
            f"(found: a GPU of {gpu / GIB:.0f} GiB; wanted: more GPUs, or a larger "
            "--rollout-num-gpus-per-engine)"
        )
