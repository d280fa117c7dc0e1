"""What a model may act in: `Environment`, what runs one, and adapters of other libraries."""

from slime.environments.protocol import Answer, Call, Environment, Step

__all__ = ["Answer", "Call", "Environment", "Step"]
