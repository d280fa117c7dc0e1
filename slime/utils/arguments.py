"""Plug-ins import the command line from here."""

from slime.arguments import UsageError, parse_args, validated_args
from slime.arguments.groups.role_config import parse_megatron_role_args

__all__ = ["UsageError", "parse_args", "parse_megatron_role_args", "validated_args"]
