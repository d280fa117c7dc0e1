"""Which GPU of the cluster belongs to whom.

One placement group of {1 GPU, 1 CPU} bundles is reserved per run. Its bundles are ordered by node
address and GPU id, both numerically, so that neighbouring ranks are neighbours in the machine room.
Trainer and engines are slices of that order; when colocated, the slices overlap and each process
takes a fraction of a GPU.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config.fleet import FleetConfig
from slime.ray.cluster import require_resources
from slime.ray.info_actor import InfoActor, Location
from slime.ray.policies import policy_configs
from slime.ray.waiting import wait_all, wait_one
from slime.utils.deadlines import within

_TABLE_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Layout:
    """GPU slots by role.

    The actor owns the first ones, of several policies one actor after the other; a critic the ``critic``
    after them, or it shares the actor's; engines ``rollout`` from ``rollout_offset`` on.
    """

    trainer: int
    rollout: int
    rollout_offset: int
    critic: int = 0

    @property
    def total(self) -> int:
        return max(self.trainer + self.critic, self.rollout_offset + self.rollout)


def trainer_gpus(policy: FleetConfig) -> int:
    """The GPUs of a policy's trainer, without those of a critic."""
    return policy.cluster.actor_num_nodes * policy.cluster.actor_num_gpus_per_node


def placement_layout(config: FleetConfig) -> Layout:
    """The slots that each role needs, from the flags alone."""
    policies = policy_configs(config).values()
    trainer = sum(map(trainer_gpus, policies))
    rollout = sum(policy.cluster.rollout_num_gpus or 0 for policy in policies)
    rollout += config.cluster.rollout_spare_gpus or 0
    critic = config.critic.critic_num_gpus
    if config.engines.rollout_external:
        rollout = 0
    if config.debug.debug_train_only:
        return Layout(trainer, rollout=0, rollout_offset=trainer + critic, critic=critic)
    if config.debug.debug_rollout_only:
        return Layout(trainer=0, rollout=rollout, rollout_offset=0)
    return Layout(trainer, rollout, 0 if config.cluster.colocate else trainer + critic, critic)


@dataclass(frozen=True)
class Slots:
    """An ordered part of a placement group: bundle indices; of each the GPU as Ray calls it and the node."""

    group: PlacementGroup | None
    bundles: tuple[int, ...]
    gpu_ids: tuple[int, ...]
    nodes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.bundles)

    def slice(self, start: int, stop: int) -> "Slots":
        part = slice(start, stop)
        return Slots(self.group, self.bundles[part], self.gpu_ids[part], self.nodes[part])

    def nodes_now(self) -> list[str]:
        """The node of each slot: for the slots of a node that it has lost Ray finds another one.

        Raises:
            LookupError: it has not yet.
            TimeoutError: it does not say.
        """
        table = within(
            _TABLE_TIMEOUT, "the table of placement groups", lambda: placement_group_table(self.group)
        )
        nodes = [table["bundles_to_node_id"].get(bundle) or "" for bundle in self.bundles]
        if table["state"] != "CREATED" or not all(nodes):
            raise LookupError(f"the placement group of the run is {table['state']}")
        return nodes

    def strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Puts an actor into the bundle of this slot."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles[slot],
            placement_group_capture_child_tasks=True,
        )


@dataclass(frozen=True)
class Placement:
    """The slots of each role in one run; a critic has none, some of its own or the actor's."""

    layout: Layout
    actor: Slots
    rollout: Slots
    critic: Slots

    def shares_gpus(self, critic: Slots) -> bool:
        """Whether a critic is on GPUs of the actor or of engines."""
        return bool({*critic.bundles} & {*self.actor.bundles, *self.rollout.bundles})

    def actor_of(self, policies: Mapping[str, FleetConfig], name: str) -> Slots:
        """The slots of one policy's actor; all of them where there is one policy."""
        if len(policies) == 1:
            return self.actor
        sizes = [trainer_gpus(policy) for policy in policies.values()]
        number = [*policies].index(name)
        return self.actor.slice(sum(sizes[:number]), sum(sizes[: number + 1]))

    def release(self) -> None:
        group = self.actor.group or self.rollout.group
        if group is not None:
            remove_placement_group(group)


def sort_key(location: tuple[str, int]) -> tuple[int, tuple[int, ...], int]:
    """Orders (node address, GPU id) numerically; a host name that resolves sorts as its address.

    A plain string order would put 10.0.0.10 before 10.0.0.9.
    """
    node, gpu_id = location
    try:
        address = ipaddress.ip_address(node)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.gethostbyname(node))
        except OSError:
            return 1, tuple(map(ord, node)), gpu_id
    return 0, (address.version, int(address)), gpu_id


def create_placement_groups(config: FleetConfig) -> Placement:
    """Reserves the GPUs of the run.

    Raises:
        ClusterTooSmall: the cluster can never hold them.
        DeadlineExceeded: they were not free within ``--cluster-timeout`` seconds.
    """
    layout = placement_layout(config)
    slots = _reserve(layout.total, config.cluster.cluster_timeout)
    actor = slots.slice(0, layout.trainer)
    critic = slots.slice(layout.trainer, layout.trainer + layout.critic) if layout.critic else actor
    return Placement(
        layout=layout,
        actor=actor,
        rollout=slots.slice(layout.rollout_offset, layout.rollout_offset + layout.rollout),
        critic=critic if config.critic.use_critic else slots.slice(0, 0),
    )


def _reserve(num_gpus: int, timeout: float) -> Slots:
    if num_gpus == 0:
        return Slots(None, (), ())
    require_resources(num_gpus)
    group = placement_group([{"GPU": 1, "CPU": 1}] * num_gpus, strategy="PACK")
    wait_one(group.ready(), f"placement group of {num_gpus} GPUs", timeout)
    locations = _locate(group, num_gpus, timeout)
    order = sorted(range(num_gpus), key=lambda i: _by_node(locations[i]))
    gpu_ids = tuple(locations[i][1] for i in order)
    return Slots(group, tuple(order), gpu_ids, nodes=tuple(locations[i][2] for i in order))


def _by_node(location: Location) -> tuple[int, tuple[int, ...], str, int]:
    address, gpu_id, node = location
    kind, number, _ = sort_key((address, gpu_id))
    return kind, number, node, gpu_id


def _locate(group: PlacementGroup, num_gpus: int, timeout: float) -> list[Location]:
    probes: list[Any] = [
        ray.remote(InfoActor)
        .options(
            num_gpus=1,
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=i
            ),
        )
        .remote()
        for i in range(num_gpus)
    ]
    try:
        return wait_all([p.locate.remote() for p in probes], "locating the GPUs", timeout)
    finally:
        for probe in probes:
            ray.kill(probe)
