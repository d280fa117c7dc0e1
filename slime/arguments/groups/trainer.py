"""The trainer's processes."""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from slime.arguments.core.flag import flag, option_string, path_flag, place_flag, refused
from slime.arguments.core.group import ConfigGroup
from slime.arguments.trainers import TRAINERS
from slime.config.limits import MAX_SEED
from slime.models.hf_config import HfConfigError, read_hf_config


@dataclass(frozen=True)
class TrainerArgs:
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


def notes(args: Namespace) -> Iterator[str]:
    """Parameters that only weight decay would change."""
    with suppress(HfConfigError):  # which derive() reports
        if "index_topk" in read_hf_config(args.hf_checkpoint) and not (
            args.freeze_indexer or args.debug_rollout_only
        ):
            yield (
                "--freeze-indexer: not given; what an indexer chooses has no gradient, so nothing trains it, "
                "and weight decay shrinks it"
            )


def contradictions(args: Namespace) -> Iterator[str]:
    """Parameters chosen in two ways, or by no pattern, or that nothing trains."""
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list: only one of them at a time"
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(args, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{option_string(name)} {pattern}: no regular expression: {error}"
    yield from _indexers(args)


def _indexers(args: Namespace) -> Iterator[str]:
    indexers = getattr(args, "dsa_indexer_freq", ())  # nothing is known of architectures without a family
    if args.freeze_indexer and indexers is None:
        yield "--freeze-indexer: config.json of --hf-checkpoint describes a model without an indexer"


CONFIG_GROUP = ConfigGroup({"trainer": TrainerArgs}, notes=notes, contradictions=contradictions)
