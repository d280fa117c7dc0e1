"""Plug-ins import the models of ``--sglang-config`` from here."""

from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig, SglangConfig

__all__ = ["ModelConfig", "ServerGroupConfig", "SglangConfig"]
