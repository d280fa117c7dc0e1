"""Where plug-ins import the command line from."""

from slime.arguments import UsageError, parse_args, validated_args

__all__ = ["UsageError", "parse_args", "validated_args"]
