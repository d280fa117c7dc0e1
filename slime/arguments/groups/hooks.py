"""Code of the user's that runs inside the trainer."""

from slime.arguments.core.group import ConfigGroup
from slime.config.hooks import HookConfig

CONFIG_GROUP = ConfigGroup({"trainer hooks": HookConfig})
