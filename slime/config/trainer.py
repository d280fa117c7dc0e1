"""The trainer's processes."""

from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flag import flag, path_flag, place_flag, refused
from slime.config.limits import MAX_SEED
from slime.config.trainers import TRAINERS


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer's processes, and which of its parameters train."""

    train_backend: str = flag(
        "megatron",
        choices=tuple(TRAINERS),
        help="trainer: megatron-core, or a transformers model under FSDP2",
    )
    train_env_vars: dict[str, Any] = flag({}, help="extra environment of trainer processes, a JSON object")
    qwen_gdn_backend: Literal["fla", "flashqla"] = refused("fla", help="kernel of Qwen's gated delta net")
    custom_model_provider_path: str | None = path_flag(
        "fn(pre_process, post_process, vp_stage=None) that returns the model"
    )
    only_train_params_name_list: list[str] | None = flag(help="regexes; only matching parameters train")
    freeze_params_name_list: list[str] | None = flag(help="regexes; matching parameters are frozen")
    freeze_indexer: bool = flag(
        False,
        help="freeze the indexers of sparse attention: they have no gradient, and weight decay shrinks them",
    )
    seed: int = flag(1234, at_least=0, at_most=MAX_SEED, help="seed of the trainer's random numbers")
    megatron_config_path: str | None = place_flag("YAML file with flags of the actor and of the critic")
