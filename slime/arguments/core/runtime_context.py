"""What becomes known only when a run starts: addresses, ranks, the length of the data.

``args`` is never written after it was parsed. A process that learns such a value makes a copy of
``args`` with it, which users' hooks read like a flag.
"""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from slime.arguments.core.run_args import copied

V = TypeVar("V")


@dataclass(frozen=True)
class RuntimeContext:
    """The values of ``args`` that are known only at run time.

    Attributes:
        rank: of this trainer process; 0 elsewhere.
        world_size: trainer processes of this role.
        num_rollout: where ``--num-epoch`` was given.
        sglang_model_routers: host and port of the router of each served model.
        sglang_router_ip: host of the default model's router; likewise its port.
        sglang_api_key: the key of all servers of the run; None if all are of others and ask for none.
        wandb_run_id: of this job's run of Weights & Biases.
        trainer_snapshots: the directory of the run's snapshots in memory; None where it takes none.
        run_uid: another one for each run. A part of it that is started again has the same.
    """

    rank: int
    world_size: int
    num_rollout: int | None
    sglang_model_routers: dict[str, tuple[str, int]]
    sglang_router_ip: str | None
    sglang_router_port: int | None
    sglang_api_key: str | None
    wandb_run_id: str | None
    trainer_snapshots: str | None
    run_uid: str


_NAMES = frozenset(field.name for field in fields(RuntimeContext))
_OF_A_PROCESS = frozenset({"rank", "world_size"})


def with_context(args: V, **values: Any) -> V:
    """A copy of ``args`` that has these values of the runtime context.

    Raises:
        TypeError: a name that `RuntimeContext` does not have.
    """
    if unknown := values.keys() - _NAMES:
        raise TypeError(
            f"not in the runtime context: {', '.join(sorted(unknown))} (wanted: {', '.join(sorted(_NAMES))})"
        )
    return copied(args, **values)


def known_to_all(args: Any) -> dict[str, Any]:
    """The values of the runtime context that all processes of a run have, as far as they are known."""
    return {name: getattr(args, name) for name in _NAMES - _OF_A_PROCESS if hasattr(args, name)}
