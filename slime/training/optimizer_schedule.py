"""How learning rate and weight decay go over a run, as the flags say it."""

from dataclasses import dataclass

from slime.config.batches import BatchConfig
from slime.config.critic import trained_rollouts
from slime.config.optimization import OptimizationConfig


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


def _trained(config: OptimizationConfig) -> int:
    return trained_rollouts(config.critic, config.data.num_rollout)


def total_optimizer_steps(config: OptimizationConfig) -> int:
    """Optimizer steps that a role takes in the whole run, at least 1."""
    return max(1, steps_of_rollouts(config.batches, _trained(config)))


def steps_of_rollouts(config: BatchConfig, rollouts: int) -> int:
    """Optimizer steps of so many full rollouts."""
    return rollouts * config.rollout_batch_size * config.n_samples_per_prompt // config.global_batch_size


def schedule_settings(config: OptimizationConfig) -> ScheduleSettings:
    """The schedule of a role, over the steps in which it trains.

    Raises:
        ValueError: the warm-up is not shorter than the decay.
    """
    optimizer, schedule, batch = config.optimizer, config.schedule, config.batches.global_batch_size
    decay_iters = schedule.lr_decay_iters or total_optimizer_steps(config)
    fraction, wsd_iters = schedule.lr_warmup_fraction, schedule.lr_wsd_decay_iters
    warmup_iters = schedule.lr_warmup_iters if fraction is None else fraction * decay_iters
    if not _trained(config):
        # Evaluation only, or a role that never trains: nothing warms up.
        warmup_iters = 0
    if warmup_iters >= decay_iters:
        raise ValueError(
            f"--lr-warmup-iters {warmup_iters}: wanted less than the {decay_iters} steps of the decay"
        )
    # A constant schedule is the same for every length of the run: extending it is no contradiction.
    constant = schedule.lr_decay_style == "constant" and not warmup_iters
    from_checkpoint = schedule.use_checkpoint_opt_param_scheduler
    override = schedule.override_opt_param_scheduler or (constant and not from_checkpoint)
    start_wd, end_wd = optimizer.start_weight_decay, optimizer.end_weight_decay
    return ScheduleSettings(
        init_lr=schedule.lr_warmup_init,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_steps=int(warmup_iters * batch),
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=optimizer.weight_decay if start_wd is None else start_wd,
        end_wd=optimizer.weight_decay if end_wd is None else end_wd,
        wd_incr_steps=total_optimizer_steps(config) * batch,
        wd_incr_style=optimizer.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=override,
        wsd_decay_steps=None if wsd_iters is None else wsd_iters * batch,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
