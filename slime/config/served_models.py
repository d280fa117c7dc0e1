"""The models of a run and their engines, as the file of ``--sglang-config`` or flags describe them."""

from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flag import flag

WorkerType = Literal["regular", "prefill", "decode", "placeholder", "encoder"]
PLACEHOLDER: WorkerType = "placeholder"
DEFAULT = "default"
"""The name of the only model, where no file names it."""


@dataclass(frozen=True)
class ServerGroupConfig:
    """Engines of one kind, on neighbouring GPUs; a placeholder keeps its GPUs free."""

    worker_type: WorkerType = flag(required=True, help="kind of the engines")
    num_gpus: int = flag(above=0, required=True, help="GPUs of the group")
    num_gpus_per_engine: int | None = flag(above=0, help="GPUs of one engine; default the model's")
    overrides: dict[str, Any] = flag({}, help="options of the server that win over --sglang-*")

    @property
    def size(self) -> int:
        """GPUs of one engine."""
        return self.num_gpus_per_engine or 1

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == PLACEHOLDER else self.num_gpus // self.size


@dataclass(frozen=True)
class ServedModelConfig:
    """One model: a router, and groups of engines behind it.

    ``update_weights`` says whether it gets the trainer's weights.

    Attributes:
        policy: whose weights those are, where several models are trained; None for that of its own name.
        evaluates: whether it is the one of ``--eval-model``.
    """

    name: str = flag(required=True, help="name by which get_model_url finds its router")
    model_path: str | None = flag(help="Hugging Face directory; default --hf-checkpoint")
    update_weights: bool | None = flag(help="default whether model_path is --hf-checkpoint")
    num_gpus_per_engine: int | None = flag(above=0, help="default --rollout-num-gpus-per-engine")
    server_groups: list[ServerGroupConfig] = flag([], help="its engines")
    update_interval: int | None = flag(
        above=0, help="rollouts for which it keeps an earlier version of the weights; default none"
    )
    policy: str | None = None
    evaluates: bool = False

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(group.worker_type in ("prefill", "decode") for group in self.server_groups)

    @property
    def has_encoder_disaggregation(self) -> bool:
        return any(group.worker_type == "encoder" for group in self.server_groups)

    @property
    def total_num_gpus(self) -> int:
        """The number of GPUs of all groups, placeholders included."""
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.server_groups)
