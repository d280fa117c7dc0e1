"""The optimizer and its schedules, under Megatron-LM's names and defaults."""

from argparse import Namespace
from collections.abc import Iterator
from typing import cast

from slime.arguments.core.flag import option_string
from slime.arguments.core.group import ConfigGroup
from slime.config.critic import CriticConfig, trained_rollouts
from slime.config.optimizer import OptimizerConfig, ScheduleConfig


def notes(args: Namespace) -> Iterator[str]:
    """Numbers of another optimizer."""
    if args.optimizer == "sgd":
        for name, default in {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}.items():
            value = getattr(args, name)
            if value != default:
                yield f"{option_string(name)} {value}: has no effect with --optimizer sgd"
    if args.sgd_momentum != 0.9 and args.optimizer != "sgd":
        yield f"--sgd-momentum {args.sgd_momentum}: has no effect without --optimizer sgd"


def contradictions(args: Namespace) -> Iterator[str]:
    """Schedules that lack a number, have one twice, or never end their warm-up."""
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: only one of them"
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield "--lr-warmup-fraction and --lr-warmup-iters: only one of them at a time"
    steps = (
        trained_rollouts(cast(CriticConfig, args), args.num_rollout)
        * args.rollout_batch_size
        * args.n_samples_per_prompt
    )
    steps = args.lr_decay_iters or steps // args.global_batch_size
    if steps and args.lr_warmup_iters >= steps:
        yield f"--lr-warmup-iters {args.lr_warmup_iters}: wanted less than the {steps} steps of the decay"
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr}: above --lr {args.lr}"
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD: needs --lr-wsd-decay-iters"
    if args.weight_decay_incr_style != "constant" and None in (
        args.start_weight_decay,
        args.end_weight_decay,
    ):
        style = args.weight_decay_incr_style
        yield f"--weight-decay-incr-style {style}: needs --start-weight-decay and --end-weight-decay"


CONFIG_GROUP = ConfigGroup(
    {"optimizer": OptimizerConfig, "learning-rate schedule": ScheduleConfig},
    notes=notes,
    contradictions=contradictions,
)
