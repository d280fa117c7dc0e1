"""How learning rate and weight decay go over a run, as the flags say it."""

from argparse import Namespace
from dataclasses import dataclass

from slime.arguments.groups.critic import trained_rollouts
from slime.arguments.views import TrackingView


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule that is counted in samples, as Megatron-LM does, under megatron-core's names.

    Attributes:
        use_checkpoint_opt_param_scheduler: a checkpoint's schedule wins over these settings.
        override_opt_param_scheduler: these settings win over a checkpoint's.
    """

    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    use_checkpoint_opt_param_scheduler: bool
    override_opt_param_scheduler: bool
    wsd_decay_steps: int | None
    lr_wsd_decay_style: str | None


def total_optimizer_steps(args: Namespace) -> int:
    """Optimizer steps that a role takes in the whole run, at least 1."""
    return max(1, steps_of_rollouts(args, trained_rollouts(args)))


def steps_of_rollouts(args: Namespace | TrackingView, rollouts: int) -> int:
    """Optimizer steps of so many full rollouts."""
    return rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def schedule_settings(args: Namespace) -> ScheduleSettings:
    """The schedule of a role, over the steps in which it trains.

    Raises:
        ValueError: the warm-up is not shorter than the decay.
    """
    batch = args.global_batch_size
    decay_iters = getattr(args, "lr_decay_iters", None) or total_optimizer_steps(args)
    fraction = getattr(args, "lr_warmup_fraction", None)
    warmup_iters = getattr(args, "lr_warmup_iters", 0) if fraction is None else fraction * decay_iters
    if not trained_rollouts(args):
        # Evaluation only, or a role that never trains: nothing warms up.
        warmup_iters = 0
    if warmup_iters >= decay_iters:
        raise ValueError(
            f"--lr-warmup-iters {warmup_iters}: wanted less than the {decay_iters} steps of the decay"
        )
    wsd_iters = getattr(args, "lr_wsd_decay_iters", None)
    # A constant schedule is the same for every length of the run: extending it is no contradiction.
    constant = args.lr_decay_style == "constant" and not warmup_iters
    from_checkpoint = getattr(args, "use_checkpoint_opt_param_scheduler", False)
    override = getattr(args, "override_opt_param_scheduler", False) or (constant and not from_checkpoint)
    start_wd, end_wd = getattr(args, "start_weight_decay", None), getattr(args, "end_weight_decay", None)
    return ScheduleSettings(
        init_lr=getattr(args, "lr_warmup_init", 0.0),
        max_lr=args.lr,
        min_lr=getattr(args, "min_lr", 0.0),
        lr_warmup_steps=int(warmup_iters * batch),
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if start_wd is None else start_wd,
        end_wd=args.weight_decay if end_wd is None else end_wd,
        wd_incr_steps=total_optimizer_steps(args) * batch,
        wd_incr_style=getattr(args, "weight_decay_incr_style", "constant"),
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=override,
        wsd_decay_steps=None if wsd_iters is None else wsd_iters * batch,
        lr_wsd_decay_style=getattr(args, "lr_wsd_decay_style", None),
    )
