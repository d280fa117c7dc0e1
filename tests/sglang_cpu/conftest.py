"""What all runs against SGLang share."""

from tests.e2e.conftest import cluster, data, model, rl_flags, start

__all__ = ["cluster", "data", "model", "rl_flags", "start"]  # fixtures
