"""Ways of weights to engines, a file each."""

from typing import TYPE_CHECKING, cast

from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.config.weight_update import WeightUpdateConfig
    from slime.weight_sync.transports.transport import Transport

TRANSPORTS = {
    "disk": "slime.weight_sync.transports.disk.DiskTransport",
    "followed": "slime.weight_sync.transports.followed.FollowedTransport",
    "delta": "slime.weight_sync.transports.delta.DeltaTransport",
    "group_delta": "slime.weight_sync.transports.group_delta.GroupDeltaTransport",
    "nixl": "slime.weight_sync.transports.nixl.NixlTransport",
    "shards": "slime.weight_sync.transports.shards.ShardTransport",
    "shard_group": "slime.weight_sync.transports.shard_group.ShardGroupTransport",
    "handle": "slime.weight_sync.transports.handle.HandleTransport",
    "broadcast": "slime.weight_sync.transports.broadcast.BroadcastTransport",
}
"""Where each one is, in the order in which they are asked whether they reach an engine."""


def transports_of(config: "WeightUpdateConfig") -> "list[Transport]":
    """Returns those that the flags ask for, unconnected."""
    kinds = [cast("type[Transport]", load_function(path)) for path in TRANSPORTS.values()]
    choice = config.weight_sync.update_weight_transport
    return [kind(config) for kind in kinds if kind.choice == choice and kind.is_wanted(config)]
