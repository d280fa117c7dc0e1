"""What the routes share."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from fastapi import Request

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.grammar.compiler import GrammarCompiler
from slime.backends.embedded_engine.grammar.constraint import Constraint
from slime.backends.embedded_engine.memory_occupation import MemoryOccupation
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.reasoning import FORMATS as REASONING
from slime.backends.embedded_engine.sequence import Sequence as Response
from slime.backends.embedded_engine.tokenizer import Tokenizer
from slime.backends.embedded_engine.weight_checker import WeightChecker
from slime.backends.embedded_engine.weight_updater import WeightUpdater

_DETERMINISTIC_SEED = 42
_MASK = 2**64 - 1
_QUICK = 10_000
"""Characters or tokens that are worked on in less than some 10 ms."""

T = TypeVar("T")


@dataclass
class ServerState:
    args: EmbeddedServerArgs
    config: ModelConfig
    context_length: int
    max_running_requests: int
    max_total_tokens: int
    parameters: NamedWeights
    engine: Engine
    tokenizer: Tokenizer | None
    updater: WeightUpdater
    checker: WeightChecker
    memory: MemoryOccupation
    model_path: str
    served_model_name: str
    grammars: GrammarCompiler | None
    started_at: float = field(default_factory=time.time)
    live_rids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.args.random_seed)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def beside(self, work: Callable[[], T], material: str | Sequence[Sized] | None) -> T:
        """Does what takes long with much material beside the event loop, one such thing at a time.

        The loop answers health checks, which must not wait for a tokenizer.
        """
        return work() if material is None else await self.aside(work, _size(material))

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """Does what ``beside`` does, given the number of characters or tokens that are worked on."""
        if size <= _QUICK:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def constrain(self, responses: list[Response], reasons: bool = False) -> None:
        """Gives responses that are to follow a grammar its beginning.

        If the model ``reasons`` first, and a parser says how, the grammar holds once it has done so.

        Raises:
            BadRequest: a grammar does not compile.
        """
        for response in responses:
            if response.params.grammar is None:
                continue
            if self.grammars is None:
                raise BadRequest("grammars: the server runs with --skip-tokenizer-init")
            compiled = await self.grammars.compiled(response.params.grammar)
            response.constraint = Constraint(compiled, self._end_of_reasoning if reasons else ())

    @cached_property
    def _end_of_reasoning(self) -> tuple[int, ...]:
        form = REASONING.get(self.args.reasoning_parser or "")
        if form is None or self.tokenizer is None:
            return ()
        return tuple(self.tokenizer.encode(form.end, add_special_tokens=False))

    def noise_seed(self, sampling_seed: int | None, sample: int) -> int:
        """Seed of one response: the request's own (plus its number), or a fresh one."""
        if sampling_seed is None and self.args.enable_deterministic_inference:
            sampling_seed = _DETERMINISTIC_SEED
        if sampling_seed is None:
            return self._seeds.getrandbits(64)
        return (sampling_seed + sample) & _MASK


def state_of(request: Request) -> ServerState:
    return request.app.state.server


def _size(material: str | Sequence[Sized]) -> int:
    return len(material) if isinstance(material, str) else sum(map(len, material))
