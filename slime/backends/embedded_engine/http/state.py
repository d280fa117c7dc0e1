"""What the routes share."""

import random
import time
from dataclasses import dataclass, field

from fastapi import Request

from slime.arguments.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.memory_occupation import MemoryOccupation
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import Parameters
from slime.backends.embedded_engine.tokenizer import Tokenizer
from slime.backends.embedded_engine.weight_checker import WeightChecker
from slime.backends.embedded_engine.weight_updater import WeightUpdater

_DETERMINISTIC_SEED = 42
_MASK = 2**64 - 1


@dataclass
class ServerState:
    args: EmbeddedServerArgs
    config: ModelConfig
    context_length: int
    max_running_requests: int
    max_total_tokens: int
    parameters: Parameters
    engine: Engine
    tokenizer: Tokenizer | None
    updater: WeightUpdater
    checker: WeightChecker
    memory: MemoryOccupation
    model_path: str
    served_model_name: str
    started_at: float = field(default_factory=time.time)
    live_rids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.args.random_seed)

    def noise_seed(self, sampling_seed: int | None, sample: int) -> int:
        """Seed of one response: the request's own (plus its number), or a fresh one."""
        if sampling_seed is None and self.args.enable_deterministic_inference:
            sampling_seed = _DETERMINISTIC_SEED
        if sampling_seed is None:
            return self._seeds.getrandbits(64)
        return (sampling_seed + sample) & _MASK


def state_of(request: Request) -> ServerState:
    return request.app.state.server
