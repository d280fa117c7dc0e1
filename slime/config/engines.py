"""The engines: which server generates, how many there are, and what they start with."""

from dataclasses import dataclass

from slime.config.flag import flag
from slime.config.limits import MAX_SECONDS
from slime.config.served_models import ServedModelConfig

CONTROL_FILE = "engines.json"
"""In a run's directory: where it is asked about its engines, and the key; only its owner reads it."""
LAST_ENGINES = "last_engines.json"
"""Beside it: what the run last knew of its engines, also when it is over."""
CROWDED = 1.5
"""Times the requests of --rollout-queue-per-engine, beyond which other engines come."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines as a whole.

    Attributes:
        rollout_engine: "sglang" or "embedded".
        rollout_external: whether the engines were started elsewhere.
        router_external: whether the first model's router was.
        served_models: of engines that we start; empty if they are external, or if there are none.
        rollout_num_engines: those that answer the prompts.
        sglang_tp_size: GPUs of one pipeline stage of an engine.
        synced_checkpoint: the directory that the engines which get the trainer's weights start with; they are
            given them in its format.
    """

    rollout_engine: str = flag(
        "auto",
        choices=("auto", "sglang", "embedded"),
        help="engine server; auto is sglang where it is installed and a GPU is present, else embedded",
    )
    sglang_config: str | None = flag(place=True, help="YAML file of models, each with groups of engines")
    rollout_external: bool = flag(
        False, help="the engines are somebody else's, those of --rollout-external-engine-addrs"
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        help="host:port of engines started elsewhere; implies --rollout-external"
    )
    prefill_num_servers: int | None = flag(
        at_least=0, same_as_default=(0,), help="engines that only prefill; the others decode"
    )
    rollout_queue_per_engine: float | None = flag(
        above=0,
        help="requests, running and waiting, that each engine of the first model is to have: engines join "
        "and leave by themselves; without it none does",
    )
    rollout_min_engines: int | None = flag(
        above=0, help="engines that --rollout-queue-per-engine leaves at least; default 1"
    )
    rollout_max_engines: int | None = flag(
        above=0,
        help="engines that --rollout-queue-per-engine has at most; default as many as there are places, "
        "those of --rollout-spare-gpus included",
    )
    rollout_scaling_interval: float = flag(
        60.0,
        above=0,
        at_most=MAX_SECONDS,
        help="seconds of generation between two decisions of --rollout-queue-per-engine",
    )
    router_external: bool
    served_models: list[ServedModelConfig]
    rollout_num_engines: int
    sglang_tp_size: int
    synced_checkpoint: str
