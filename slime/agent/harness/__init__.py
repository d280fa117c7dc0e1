"""Runs command-line agents of others in sandboxes; they generate through an adapter.

async with LocalSandbox(ports=[server.port]) as sandbox:
    adapter.open_session(key)
    code = await ClaudeCodeHarness().run(
        sandbox, workdir="/workspace/repo", session_id=key, adapter_url=server.url,
        time_budget_sec=600, prompt="Make the tests pass.",
    )
    samples = await adapter.finish_session(key, base_sample=sample, reward=...)
"""

from slime.agent.harness.agents import ClaudeCodeHarness, CodexHarness, CommandHarness
from slime.agent.harness.common import BaseHarness, HarnessContext, run_agent

CLAUDE_CODE, CODEX = ClaudeCodeHarness(), CodexHarness()
"""The harnesses of both with their defaults; they hold nothing of a task."""

__all__ = [
    "CLAUDE_CODE",
    "CODEX",
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "CommandHarness",
    "HarnessContext",
    "run_agent",
]
