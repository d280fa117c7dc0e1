"""The actors that the driver starts. What they do is imported in their own processes: it takes seconds."""

from collections.abc import Callable, Iterable
from typing import Any

from slime.utils.misc import load_function


def _late(path: str, methods: Iterable[str]) -> type:
    """A class for ``ray.remote`` with these methods of the class at ``path``, which it imports when made."""

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        self.real = load_function(path)(*arguments, **options)

    members = {name: _forwarded(name) for name in methods} | {"__init__": init, "__module__": __name__}
    return type(path.rpartition(".")[2], (), members)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.real, name)(*arguments, **options)

    method.__name__ = method.__qualname__ = name
    return method


RolloutManager = _late(
    "slime.ray.rollout_manager.RolloutManager",
    [
        *("check", "dispose", "eval", "generate", "load", "notices", "num_rollout", "num_rollout_per_epoch"),
        *(
            "offload",
            "onload",
            "set_train_parallel_config",
            "start",
            "updatable_engines",
            "weights_updated",
        ),
        *("check_policy", "data_state", "engine_processes", "probe_tokens", "process_location", "restore"),
        *("ask_membership", "beside", "router_url", "want_evaluation"),
    ],
)
Evaluator = _late("slime.ray.evaluator.Evaluator", ["eval", "process_location"])
_OF_A_RANK = (
    *("address_and_free_port", "connect_rollout_engines", "follow_engines", "go_on", "init"),
    *("offload_training_state", "serve_tenants", "tenant"),
    *("parallel_config", "save_model", "sleep", "take_spans", "text_log_probs", "train"),
    *("trained_steps", "update_weights", "wake_up", "process_location"),
)
TrainRayActor = _late("slime.ray.train_worker.TrainRayActor", _OF_A_RANK)
StandbyRank = _late("slime.ray.standby_rank.StandbyRank", [*_OF_A_RANK, "take_place"])
SnapshotHolder = _late(
    "slime.ray.snapshot_holder.SnapshotHolder",
    [
        *("copy_parts", "files", "forget_after", "host", "keep", "keep_parts", "lacks_room", "mark", "open"),
        *("parts", "prepare", "publish", "read"),
    ],
)
