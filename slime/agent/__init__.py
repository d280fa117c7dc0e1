"""Agents: where their code and tools run."""
