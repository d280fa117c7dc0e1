"""The trainer's work for all tenants: one request after the other, in the order in which they came."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slime.config.run import RunConfig
from slime.training.backend import Adam
from slime_plugins.training_service.schema import AdamParams, Datum, ForwardBackward, Request, State

T = TypeVar("T")
MARKER = "state.json"
WAITING_LIMIT = 256


class Refused(ValueError):
    """What was asked cannot be done; nothing was."""


class UnknownTenant(Refused):
    """No tenant has this name."""


class Busy(RuntimeError):
    """More requests would wait than may."""


class Trainer(Protocol):
    """The part of a `slime.ray.train_group.RayTrainGroup` that tenants need."""

    def call_all(self, what: str, method: str, *arguments: Any) -> list[Any]: ...

    def update_weights(self, adapters: Sequence[str] | None = None) -> None: ...


class Tenants:
    """The tenants of a run, by the names of its adapters.

    Attributes:
        failure: what ended the trainer's work; nothing is done after it.
        ended: is set with it.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self.names, self.vocab_size = tuple(config.lora.named_adapters), config.model.vocab_size
        self._config, self._trainer = config, trainer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tenants")
        self._waiting = threading.Semaphore(WAITING_LIMIT)
        self._with_gradients: set[str] = set()
        self.failure: Exception | None = None
        self.ended = threading.Event()

    def submit(self, name: str, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Has a method of this object done for a tenant.

        Raises:
            UnknownTenant: there is none of that name.
            Busy: too many requests wait.
        """
        self.require(name)
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{WAITING_LIMIT} requests wait for the trainer")
        future = self._pool.submit(self._done, work, name, *arguments)
        future.add_done_callback(lambda _: self._waiting.release())
        return future

    def require(self, name: str) -> None:
        """Refuses a name that is no tenant's."""
        if name not in self.names:
            raise UnknownTenant(f"tenant {name!r}: there is none (wanted: {', '.join(self.names)})")

    def require_tokens(self, tokens: Sequence[int]) -> None:
        """Refuses ids that the model has no embedding for."""
        if max(tokens) >= self.vocab_size:
            raise Refused(f"token {max(tokens)}: not in the vocabulary (wanted: below {self.vocab_size})")

    def _done(self, work: Callable[..., T], *arguments: Any) -> T:
        if self.failure is not None:
            raise RuntimeError(f"the service ends: {self.failure}")
        try:
            return work(*arguments)
        except Refused:
            raise
        except Exception as error:  # of some rank, perhaps half-way: what adapters are then nobody knows
            self.failure = error
            self.ended.set()
            raise

    def begin(self) -> None:
        """Has the trainer work for tenants, and gives engines all adapters."""
        self._trainer.call_all("beginning to serve tenants", "serve_tenants")
        self._trainer.update_weights()

    def forward_backward(self, name: str, asked: ForwardBackward) -> dict[str, Any]:
        """Adds gradients to the tenant's; the losses and log-probs that they are of."""
        for datum in asked.data:
            self.require_tokens(datum.tokens)
            self._require_room(datum)
        data = [datum.for_trainer() for datum in asked.data]
        found = self._call(name, "forward_backward", data, asked.loss_fn, asked.loss_fn_config)
        told = {number: of for rank in found for number, of in rank.items()}
        self._with_gradients.add(name)
        loss = sum(told[number][0] for number in range(len(data)))
        return {
            "loss_fn_outputs": [{"logprobs": told[number][1]} for number in range(len(data))],
            "metrics": {"loss:sum": loss if math.isfinite(loss) else None},
        }

    def _require_room(self, datum: Datum) -> None:
        longest = (
            self._config.batches.max_tokens_per_gpu or 0
        ) * self._config.parallelism.context_parallel_size
        if len(datum.tokens) > longest:
            raise Refused(
                f"a datum of {len(datum.tokens)} tokens (wanted: at most {longest} of a micro-batch)"
            )

    def optim_step(self, name: str, asked: AdamParams) -> dict[str, Any]:
        """Takes a step with the gradients since the last one."""
        if name not in self._with_gradients:
            raise Refused(f"optim_step: {name} has no gradients (wanted: forward_backward before)")
        self._with_gradients.remove(name)
        if not all(self._call(name, "optim_step", Adam(**asked.model_dump()))):
            raise Refused(f"optim_step: the gradients of {name} are not finite; they are forgotten")
        return {"metrics": {}}

    def save_weights_for_sampler(self, name: str, asked: Request) -> dict[str, Any]:
        """Gives engines the tenant's weights; those of others stay as they are there."""
        self._call(name, "publish")
        self._trainer.update_weights([name])
        return {"path": f"tenants/{name}/sampler"}

    def save_state(self, name: str, asked: State) -> dict[str, Any]:
        """Writes weights and optimizer state below ``--save``."""
        directory = self._directory(asked.of or name, asked.name)
        if asked.of not in (None, name):
            raise Refused(f"save_state: of {asked.of} (wanted: {name}, or nothing)")
        if (directory / MARKER).exists():
            raise Refused(f"save_state: {asked.name} is there already (wanted: another name)")
        directory.mkdir(parents=True, exist_ok=True)
        self._call(name, "save_state", str(directory))
        (directory / MARKER).write_text(json.dumps(self._form()))
        return {"path": str(directory)}

    def load_state(self, name: str, asked: State) -> dict[str, Any]:
        """Goes on from a saved state; gradients are forgotten."""
        directory = self._directory(asked.of or name, asked.name)
        if not (directory / MARKER).exists():
            raise Refused(f"load_state: {directory} is no saved state")
        found, wanted = json.loads((directory / MARKER).read_text()), self._form()
        differ = [
            f"{key} {found.get(key)} (wanted: {wanted[key]})"
            for key in wanted
            if found.get(key) != wanted[key]
        ]
        if differ:
            raise Refused(f"load_state: {asked.name} was saved with {', '.join(differ)}")
        self._call(name, "load_state", str(directory))
        self._with_gradients.discard(name)
        return {"path": str(directory)}

    def _directory(self, name: str, state: str) -> Path:
        if self._config.checkpoints.save is None:
            raise Refused("states: the service has no place for them (wanted: --save DIR)")
        return Path(self._config.checkpoints.save, "tenants", name, state)

    def _form(self) -> dict[str, Any]:
        """What a state has to have in common with the run that loads it: each rank writes its own part."""
        config, parallel, lora = self._config, self._config.parallelism, self._config.lora
        return {
            "base": config.hf_checkpoint.hf_checkpoint,
            "world_size": config.cluster.trainer_world_size,
            "tensor_model_parallel_size": config.megatron.tensor_model_parallel_size,
            "pipeline_model_parallel_size": config.megatron.pipeline_model_parallel_size,
            "context_parallel_size": parallel.context_parallel_size,
            "bf16": config.precision.bf16,
            "lora_rank": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "lora_target_modules": list(lora.lora_target_modules),
        }

    def _call(self, name: str, method: str, *arguments: Any) -> list[Any]:
        return self._trainer.call_all(f"{method} of {name}", "tenant", method, name, *arguments)
