"""How weights travel from the trainer to the engines."""

from slime.arguments.core.group import ConfigGroup
from slime.config.weight_sync import WeightSyncConfig

CONFIG_GROUP = ConfigGroup({"weight sync": WeightSyncConfig})
