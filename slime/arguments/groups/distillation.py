"""On-policy distillation: a teacher judges the student's own tokens."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.checkpoint_files import bad_checkpoint, unusable_weights
from slime.config.distillation import DistillationConfig

TEACHER_MODEL = "teacher"
"""The name by which a teacher among the served models is found."""
TEACHER_REWARD = "slime.rollout.on_policy_distillation.reward_func"


def notes(args: Namespace) -> Iterator[str]:
    """Settings without distillation, and a teacher that is not asked at the student's temperature."""
    if not args.use_opd:
        if args.opd_type is not None:
            yield f"--opd-type {args.opd_type}: has no effect without --use-opd"
        if args.opd_kl_coef != 1:
            yield f"--opd-kl-coef {args.opd_kl_coef}: has no effect without --use-opd"
    elif args.opd_type == "sglang" and args.rollout_temperature != 1:
        yield (
            f"--opd-type sglang: engines give log-probs of prompts at temperature 1, so the student at "
            f"--rollout-temperature {args.rollout_temperature} learns to be as the teacher at 1"
        )


def contradictions(args: Namespace) -> Iterator[str]:
    """A teacher in two places, in none, or of no use."""
    yield from _bad_teacher(args)
    if not args.use_opd:
        return
    if args.opd_type is None:
        yield "--use-opd: needs --opd-type (sglang or megatron)"
    if args.loss_type == "policy_loss" and not args.compute_advantages_and_returns:
        yield "--use-opd: there are no advantages (wanted: without --disable-compute-advantages-and-returns)"
    if args.loss_type == "sft_loss":
        yield "--use-opd: --loss-type sft_loss has no advantages"


def _bad_teacher(args: Namespace) -> Iterator[str]:
    in_trainer = args.use_opd and args.opd_type == "megatron"
    if in_trainer and args.opd_teacher_load is None:
        yield "--opd-type megatron: needs --opd-teacher-load"
    for name, _ in given(args, "opd_teacher_load", "opd_teacher_ckpt_step") if not in_trainer else ():
        yield f"{name}: needs --use-opd --opd-type megatron"
    served = any(model.name == TEACHER_MODEL for model in args.served_models)
    if args.custom_rm_path == TEACHER_REWARD and args.rm_url is None and not served:
        yield f"--custom-rm-path {TEACHER_REWARD}: needs --rm-url, the address of the teacher's /generate"


def missing(args: Namespace) -> Iterator[str]:
    """The teacher's checkpoint."""
    return bad_checkpoint(args, "opd_teacher_load", args.opd_teacher_ckpt_step)


def unusable(args: Namespace) -> Iterator[str]:
    """Weights of the teacher that cannot be read."""
    return unusable_weights(args, "opd_teacher_load")


CONFIG_GROUP = ConfigGroup(
    {"on-policy distillation": DistillationConfig},
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
