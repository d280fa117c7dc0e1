"""The memory of a node's host: what trainer ranks keep beside their GPUs, and the samples of a rollout."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from slime.check.layout import Layout
from slime.check.states import GATHERED, States
from slime.config.cluster import snapshots_are_on_hosts
from slime.config.host import HostConfig
from slime.config.trainers import trainer_of
from slime.utils.checkpoint_record import KEPT_SNAPSHOTS

_STANDBY = 300 * 2**20
"""A process that has imported the trainer holds so much, as measured without CUDA's libraries."""
_IN_LISTS = 40 + 32 + 8
"""Bytes of a token in lists of Python: an id and its place, a log-prob and its place, a place of the mask."""
_STORED = 16
"""Bytes of a token as Ray keeps it for the trainers, pickled."""


@dataclass(frozen=True)
class RankHost:
    """Bytes of a rank.

    Attributes:
        optimizer: what ``--optimizer-cpu-offload`` or ``--fsdp-cpu-offload`` keeps there.
        asleep: copies of what leaves the GPU while engines generate on it.
        versions: of weights, or of adapters, beside the trained ones, and a copy of those for when another is
            in their place.
        saving: what is gathered for a checkpoint, while it is written.
        snapshots: its part of those in memory, the newest one and another, which may be being written.
        standbys: processes that wait for its place.
    """

    optimizer: int = 0
    asleep: int = 0
    versions: int = 0
    saving: int = 0
    snapshots: int = 0
    standbys: int = 0

    def __add__(self, other: "RankHost") -> "RankHost":
        return RankHost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> int:
        """All of it at once: memory that was pinned stays so until it is needed again."""
        return sum(astuple(self))


def rank_host(config: HostConfig, states: States, critic: bool = False) -> RankHost:
    """What a rank with these states on its GPU keeps on the host.

    Args:
        config: as its role sees it.
    """
    cluster, saves, snapshots = config.cluster, config.checkpoints, _snapshots(config, states)
    sleeps = cluster.offload_train and not (critic and config.critic.critic_num_gpus)
    return RankHost(
        optimizer=states.host,
        asleep=states.weights + states.optimizer if sleeps else _asleep_in_updates(config, states),
        versions=_versions(config) * states.kept,
        saving=_saving(config, states) if snapshots or None not in (saves.save, saves.save_interval) else 0,
        snapshots=snapshots,
        standbys=_STANDBY * config.fault_tolerance.trainer_standbys,
    )


def _asleep_in_updates(config: HostConfig, states: States) -> int:
    """What a trainer that ends after a weight update leaves to engines on its GPU meanwhile."""
    return states.optimizer if config.weight_sync.release_train and config.cluster.colocate else 0


def _versions(config: HostConfig) -> int:
    beside = int(config.kl.kl_coef != 0 or config.kl.use_kl_loss)
    beside += config.distillation.use_opd and config.distillation.opd_type == "megatron"
    beside += 2 * config.off_policy.keep_old_actor
    return beside + 1 if beside else 0


def _snapshots(config: HostConfig, states: States) -> int:
    if config.fault_tolerance.trainer_snapshot_interval is None:
        return 0
    moving = (config.kl.kl_coef != 0 or config.kl.use_kl_loss) and config.kl.ref_update_interval is not None
    return _snapshots_at_once(config) * (states.stored + moving * states.kept)


def _snapshots_at_once(config: HostConfig) -> int:
    """Counts the parts of a rank's size that its host has room for, for each rank.

    Those that it copies are of other ranks. Ranks that are built again find the whole of one iteration on
    each host.
    """
    nodes, copies = config.cluster.actor_num_nodes, config.fault_tolerance.trainer_snapshot_copies or 0
    if not snapshots_are_on_hosts(config.fault_tolerance, nodes):
        return KEPT_SNAPSHOTS
    return max(KEPT_SNAPSHOTS * (1 + copies), nodes)


def _saving(config: HostConfig, states: States) -> int:
    if config.checkpoints.no_save_optim and config.fault_tolerance.trainer_snapshot_interval is None:
        return states.kept
    if trainer_of(config.trainer).splits_weights_evenly:
        return states.kept + states.optimizer
    return states.kept + GATHERED * states.trained


def ranks_of_a_node(config: HostConfig, critic: bool) -> int:
    """Counts the ranks of a role on each node."""
    own = config.critic.critic_num_gpus_per_node if critic else None
    return own or config.cluster.actor_num_gpus_per_node


@dataclass(frozen=True)
class NodeHost:
    """The node whose ranks of a role need most.

    Attributes:
        needs: of all these ranks together.
    """

    ranks: range
    needs: RankHost


def fullest_node(layout: Layout, per_node: int, stages: Sequence[RankHost]) -> NodeHost:
    """Finds that node: ranks are placed on nodes in their order.

    Args:
        stages: needs of a rank of each pipeline stage.
    """
    size = layout.world // layout.pp
    nodes = [range(first, min(first + per_node, layout.world)) for first in range(0, layout.world, per_node)]
    found = [NodeHost(ranks, sum((stages[rank // size] for rank in ranks), RankHost())) for ranks in nodes]
    return max(found, key=lambda node: node.needs.total)


def sample_bytes(config: HostConfig, longest: int) -> int:
    """Bytes of a rollout's samples where they are made, all of them as long as the longest."""
    samples = config.batches.rollout_batch_size * config.batches.n_samples_per_prompt
    return samples * longest * (_IN_LISTS + _STORED)
