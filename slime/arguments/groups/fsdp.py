"""The flags of the FSDP trainer, and what of the others' the trainer of a run cannot honour."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.arguments.core.flag import Flag, flags_of, option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.megatron import HONOURED, megatron_flags
from slime.arguments.validate.checkpoint_files import is_release
from slime.config.fsdp import FsdpConfig
from slime.config.trainers import FSDP, trainer_of
from slime.models import FAMILIES, HfConfigError, read_shape
from slime.models.any_decoder import require_causal, transformers_config
from slime.models.hf_config import HfConfig
from slime.models.weight_prefix import WeightPrefix


def _differs(args: Namespace, spec: Flag) -> bool:
    return bool(getattr(args, spec.dest, spec.default) != spec.default)


def notes(args: Namespace) -> Iterator[str]:
    """Flags of the other trainer."""
    trainer = trainer_of(args)
    if trainer.flag_group != FSDP.flag_group:
        for spec in flags_of(FsdpConfig):
            if _differs(args, spec):
                yield f"{spec.names[0]}: has no effect without --train-backend {FSDP.name}"
    idle = HONOURED - (HONOURED if trainer.reads is None else trainer.reads) - trainer.refused.keys()
    for spec in megatron_flags((), ()):
        if spec.dest in idle and _differs(args, spec):
            yield f"{spec.names[0]}: has no effect with --train-backend {trainer.name}{_instead(spec.dest)}"
    for name in sorted(trainer.idle):
        value: Any = getattr(args, name, None)
        if value and value not in ("auto", "torch_dist", 128, "allgather"):
            yield f"{option_string(name)}: has no effect with --train-backend {trainer.name}"


def _instead(dest: str) -> str:
    return " (see --gradient-checkpointing)" if dest.startswith("recompute") else ""


def contradictions(args: Namespace) -> Iterator[str]:
    """What the trainer cannot do, before any process starts."""
    trainer = trainer_of(args)
    for name, (neutral, instead) in trainer.refused.items():
        value = getattr(args, name, None)
        if value is not None and value != neutral:
            shown = "" if value is True else f" {value}"
            named = f"{option_string(name)}{shown}"
            yield f"{named}: not supported with --train-backend {trainer.name} ({instead})"
    if args.context_parallel_size > 1 and not trainer.packs_any_attention:
        yield from _rows_not_packed(args)
    if trainer.transformers_model:
        yield from _not_served(args)


def _rows_not_packed(args: Namespace) -> Iterator[str]:
    """Context parallelism splits packed rows. Of architectures without a family the trainer measures it."""
    size = args.context_parallel_size
    if args.attn_implementation != "flash_attention_2":
        yield (
            f"--context-parallel-size {size}: splits packed rows, which "
            f"--attn-implementation {args.attn_implementation} does not have (wanted: flash_attention_2)"
        )
    family = FAMILIES.get(args.model_type)
    if family is not None and family.attention and not args.debug_rollout_only:
        yield (
            f"--context-parallel-size {size}: not with model_type {args.model_type}, whose "
            f"{family.attention} --train-backend {trainer_of(args).name} does not compute in packed "
            "rows (wanted: 1)"
        )


def _not_served(args: Namespace) -> Iterator[str]:
    """An architecture that this trainer takes and the embedded engine does not."""
    if args.rollout_engine != "embedded" or args.debug_train_only or args.rollout_external:
        return
    try:
        read_shape(args.hf_checkpoint)
    except HfConfigError as error:
        yield f"--hf-checkpoint {args.hf_checkpoint}: the embedded engine cannot serve it: {error}"


def missing(args: Namespace) -> Iterator[str]:
    """Checkpoints that another trainer wrote."""
    trainer = trainer_of(args)
    for name in ("load", "ref_load", "opd_teacher_load", "critic_load"):
        path = getattr(args, name)
        found = checkpoint_format(path) if path is not None else None
        if path is not None and is_release(path):
            found = "torch_dist"
        if found is not None and not trainer.wrote(found):
            wanted = f"one that --train-backend {trainer.name} wrote, or a Hugging Face directory"
            yield f"{option_string(name)} {path}: its format is {found} (wanted: {wanted})"


def checkpoint_format(root: str | Path) -> str | None:
    """What the newest complete checkpoint below ``root`` says of its format; None without one."""
    found = sorted(Path(root).glob("iter_*/metadata.json"))
    try:
        return json.loads(found[-1].read_text()).get("sharded_backend") if found else None
    except (OSError, ValueError, AttributeError):
        return None


def unusable(args: Namespace) -> Iterator[str]:
    """A model that ``transformers`` does not compute, though a family here may."""
    trainer = trainer_of(args)
    if not trainer.transformers_model or args.debug_rollout_only:
        return
    path, trusted = args.hf_checkpoint, args.trust_remote_code
    try:
        config = transformers_config(path, trusted)
        family = FAMILIES.get(HfConfig.read(path).get("model_type"))
        if family is not None and family.weights.prefix != WeightPrefix():  # beside parts that do not train
            config = config.get_text_config()
        require_causal(config, path, trusted)
    except HfConfigError as error:
        wanted = "an architecture that transformers knows, or code in the checkpoint and --trust-remote-code"
        yield f"--hf-checkpoint {path}: --train-backend {trainer.name}: {error} (wanted: {wanted})"


CONFIG_GROUP = ConfigGroup(
    {FSDP.flag_group: FsdpConfig},
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
