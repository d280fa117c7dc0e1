"""The trainer's processes."""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress

from slime.arguments.core.flag import option_string
from slime.arguments.core.group import ConfigGroup
from slime.config.trainer import TrainerConfig
from slime.models.hf_config import HfConfigError, read_hf_config


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


CONFIG_GROUP = ConfigGroup({"trainer": TrainerConfig}, notes=notes, contradictions=contradictions)
