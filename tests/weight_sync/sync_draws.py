"""Settings of weight updates, drawn by chance."""

import random
from dataclasses import dataclass, replace

FROM_RANKS = ("shards", "shard group")
TRANSPORTS = ("handle", "broadcast", "handle and broadcast", "disk", "delta", "group delta", *FROM_RANKS)
ON_DISK = ("disk", "delta")
MERGED = (*ON_DISK, "group delta", *FROM_RANKS)
"""A folder has no place for adapters beside the base, with them nothing of the base changes, and ranks of
engines do not share them."""
MODELS = ("qwen3", "llama", "qwen3_moe")
WITH_EXPERTS = ("qwen3_moe", "gpt_oss")
_FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Draw:
    """A trainer and some updates.

    Attributes:
        engine_ranks: tensor-parallel ranks of each engine.
        data: data-parallel ranks, over which experts are spread too.
        context: context-parallel ranks.
        adapts: whether the trainer has an adapter.
        merges: whether its weights are merged with that one; else engines get it beside them.
    """

    seed: int
    model: str
    tied: bool
    form: str
    trains_in: str
    serves_in: str
    tensor: int
    pipeline: int
    virtual: bool
    expert: int
    data: int
    transport: str
    engines: int
    bucket: int
    syncs: int
    backend: str = "megatron"
    context: int = 1
    adapts: bool = False
    merges: bool = True
    engine_ranks: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


def draw(seed: int, transport: str | None = None, most_ranks: int = 4) -> Draw:
    """A setting, by chance."""
    rng = random.Random(seed)
    model, transport = rng.choice(MODELS), transport or rng.choice(TRANSPORTS)
    while True:
        tensor, pipeline, data = (rng.choice((1, 2)) for _ in range(3))
        if tensor * pipeline * data <= most_ranks:
            break
    expert = rng.choice((1, 2)) if model == "qwen3_moe" and tensor * data > 1 else 1
    forms = ("plain", "fp8", "int4") if model == "qwen3_moe" else ("plain", "fp8")  # int4 is for experts
    forms = ("plain",) if transport in FROM_RANKS else forms
    engines = rng.choice((1, 2))
    if transport in ("handle", "shards"):
        engines = min(engines, tensor * pipeline * data)
    drawn = Draw(
        seed=seed,
        model=model,
        tied=rng.random() < 0.5,
        form=rng.choice(forms),
        trains_in=rng.choice(_FLOATS),
        serves_in=rng.choice(_FLOATS),
        tensor=tensor,
        pipeline=pipeline,
        virtual=pipeline == 2 and rng.random() < 0.5,
        expert=expert,
        data=data,
        transport=transport,
        engines=2 if transport == "handle and broadcast" else engines,
        bucket=int(10 ** rng.uniform(0, 6)),
        syncs=rng.choice((1, 2, 3)),
    )
    return _with_engine_ranks(_in_mxfp8(_with_sinks(_on_a_backend(drawn, rng, most_ranks))))


def _with_engine_ranks(one: Draw) -> Draw:
    """Returns some of the settings with engines of two ranks, each of which has trainer ranks behind it."""
    colocated = 2 * one.engines
    behind = {"handle": colocated, "shards": colocated, "handle and broadcast": 2}.get(one.transport, 0)
    if behind > one.ranks or random.Random(f"{one.seed} engine ranks").random() < 0.5:
        return one
    return replace(one, engine_ranks=2)


def _on_a_backend(one: Draw, rng: random.Random, most_ranks: int) -> Draw:
    """Returns the setting with what only one of the backends has."""
    if rng.random() < 0.3 and one.transport not in FROM_RANKS:
        alone = {"tensor": 1, "pipeline": 1, "virtual": False, "expert": 1}
        adapted = _with_adapters(one, random.Random(f"{one.seed} fsdp"))
        return replace(adapted, backend="fsdp", data=min(one.ranks, 2), engines=min(one.engines, 2), **alone)
    context = rng.choice((1, 2)) if 2 * one.ranks <= most_ranks else 1
    return _with_adapters(replace(one, context=context), rng)


def _with_adapters(one: Draw, rng: random.Random) -> Draw:
    adapts = one.model != "qwen3_moe" and rng.random() < 0.5
    merges = not adapts or one.transport in MERGED or rng.random() < 0.5
    return replace(one, adapts=adapts, merges=merges)


def _with_sinks(one: Draw) -> Draw:
    """Returns now and then, in the place of another model with experts, the one that MXFP4 is for."""
    rng = random.Random(f"{one.seed} gpt_oss")
    others = one.backend != "megatron" or one.context > 1 or one.transport in FROM_RANKS
    if one.model != "qwen3_moe" or others or rng.random() < 0.5:
        return one
    return replace(one, model="gpt_oss", tied=False, form=rng.choice(("plain", "mxfp4")))


def _in_mxfp8(one: Draw) -> Draw:
    """Returns half of the settings in float8 with the other form that this has."""
    rng = random.Random(f"{one.seed} mxfp8")
    return replace(one, form="mxfp8") if one.form == "fp8" and rng.random() < 0.5 else one
