"""Who shares what is decided here, once; the loops then treat every layout alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slime.arguments.core.runtime_context import with_context
from slime.arguments.groups.critic import of_critic
from slime.config.run import RunConfig, run_config
from slime.observability import phases
from slime.observability.policy_log import PolicyLog
from slime.observability.run_log import RunLog
from slime.ray.cluster import reaper_ends_it
from slime.ray.ending import leaving_within
from slime.ray.engine_slots import require_neighbours
from slime.ray.placement_group import Placement, create_placement_groups
from slime.ray.policies import policy_configs
from slime.ray.policy_groups import PolicyGroups
from slime.ray.policy_side import PolicySide
from slime.ray.released_group import ReleasedTrainGroup
from slime.ray.rollout_group import RolloutGroup
from slime.ray.train_group import RayTrainGroup

_STOP_TIMEOUT = 60.0  # seconds, of which engines have half to end by themselves


@dataclass(frozen=True)
class Groups:
    """The sides of a run, ready to work, and the configuration with what has become known since."""

    config: RunConfig
    actor: RayTrainGroup | PolicyGroups
    critic: RayTrainGroup
    rollout: RolloutGroup


def sides(config: RunConfig) -> list[str]:
    """What a run starts, in words: some runs have no engines, others no trainer."""
    missing = {"engines": config.debug.debug_train_only, "trainer": config.debug.debug_rollout_only}
    return [side for side, is_missing in missing.items() if not is_missing]


def _say_ready(config: RunConfig) -> None:
    match sides(config):
        case ["trainer"]:
            phases.reached("data is ready", then="loading the trainer")
        case ["engines"]:
            phases.reached("engines and data are ready", then="entering the loop")
        case _:
            phases.reached("engines and data are ready", then="loading the trainer")


@contextmanager
def running_groups(config: RunConfig, log: RunLog) -> Iterator[Groups]:
    """Places, starts and connects all sides, and stops them on exit.

    Engines and trainers start side by side, as each takes long: the first wait comes when all have
    been started. A critic that shares GPUs starts its turns offloaded.
    """
    placement = create_placement_groups(config)
    cluster = config.cluster
    engines = config.engines.served_models, placement.rollout
    require_neighbours(*engines, cluster.num_gpus_per_node, cluster.rollout_spare_gpus)
    rollout = RolloutGroup(
        config, placement.rollout, len(placement.actor), log, needs_offload=config.cluster.offload_rollout
    )
    trainers: list[RayTrainGroup | PolicyGroups] = []
    try:
        if config.data.num_rollout is None:
            # The length of the data decides, and the trainer's schedule needs it.
            rollout.wait_ready()
            config = run_config(with_context(config.flat, num_rollout=rollout.num_rollout))
        critic = _critic(config, placement, rollout, log)
        trainers.append(critic)
        actor = _actor(config, placement, rollout, log)
        trainers.append(actor)
        rollout.wait_ready()
        _say_ready(config)
        critic.wait_ready()
        critic.offload()
        actor.wait_ready()
        if len(sides(config)) > 1:
            phases.reached("the trainer is ready", then="giving engines their first weights")
        rollout.load(actor.start_rollout_id - 1)
        yield Groups(config, actor, critic, rollout)
    finally:
        if not reaper_ends_it():
            with leaving_within(_STOP_TIMEOUT, "stopping trainer and engines"):
                for trainer in trainers:
                    trainer.shutdown()
                rollout.shutdown()
                placement.release()


def _critic(config: RunConfig, placement: Placement, rollout: RolloutGroup, log: RunLog) -> RayTrainGroup:
    return RayTrainGroup(
        run_config(of_critic(config.flat)) if config.critic.use_critic else config,
        placement.critic,
        rollout,
        log,
        role="critic",
        needs_offload=config.cluster.offload_train and placement.shares_gpus(placement.critic),
    )


def _actor(
    config: RunConfig, placement: Placement, rollout: RolloutGroup, log: RunLog
) -> RayTrainGroup | PolicyGroups:
    """The trainer of the only model, or those of all policies."""
    policies = policy_configs(config)
    if len(policies) == 1:
        offloads = config.cluster.offload_train
        kind = ReleasedTrainGroup if config.weight_sync.release_train else RayTrainGroup
        return kind(config, placement.actor, rollout, log, needs_offload=offloads)
    return PolicyGroups(
        {
            name: RayTrainGroup(
                own,
                placement.actor_of(policies, name),
                PolicySide(rollout, name),
                PolicyLog(log, name),
                needs_offload=own.cluster.offload_train,
            )
            for name, own in policies.items()
        }
    )
