"""APIs like those of providers, through which agents of other programs generate with a run's engines."""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "OpenAIAdapter"]
