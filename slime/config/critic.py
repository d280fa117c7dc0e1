"""The critic: whether there is one, where it trains, and what of the flags its processes see otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of --advantage-estimator ppo, a second model that is trained to know the returns.

    Attributes:
        critic_num_gpus: GPUs of its own; 0 if it shares the actor's.
        critic_resumes: whether it goes on where a checkpoint of this run ended.
        critic_overrides: what ``--megatron-config-path`` says of it, beside flags that have names of its own.
    """

    critic_num_nodes: int | None = flag(
        above=0, help="critic nodes, for GPUs of its own; default the actor's GPUs"
    )
    critic_num_gpus_per_node: int | None = flag(
        above=0, help="critic GPUs of each node, for GPUs of its own; default the actor's GPUs"
    )
    critic_load: str | None = flag(
        place=True,
        help="checkpoint of the critic; default critic/ in --load, else what the actor starts with",
    )
    critic_save: str | None = flag(
        place=True, help="directory of the critic's checkpoints; default critic/ in --save"
    )
    critic_lr: float | None = flag(at_least=0, at_most=1, help="learning rate of the critic; default --lr")
    critic_lr_warmup_iters: int = flag(0, at_least=0, help="steps of the warm-up of the critic's rate")
    critic_train_only: bool = flag(False, help="the actor never trains, in no rollout")
    num_critic_only_steps: int = flag(0, at_least=0, help="rollouts before the actor starts to train")
    use_critic: bool
    critic_num_gpus: int
    critic_resumes: bool
    critic_overrides: Mapping[str, Any]


def trained_rollouts(critic: CriticConfig, num_rollout: int | None) -> int:
    """Rollouts of the run in which a role trains, as its processes see the flags.

    The first ones may be the critic's alone (--num-critic-only-steps).
    """
    alone = critic.num_critic_only_steps if critic.use_critic else 0
    return max(0, (num_rollout or 0) - alone)


def trains_actor(critic: CriticConfig, rollout_id: int) -> bool:
    """Whether the actor trains in a rollout, or only the critic, if there is one."""
    if not critic.use_critic:
        return True
    return not critic.critic_train_only and rollout_id >= critic.num_critic_only_steps
