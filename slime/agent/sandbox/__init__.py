"""Places to run code that nobody trusts: on this machine, in containers, or at E2B."""

from slime.agent.sandbox.container import ContainerLimits, ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.limits import Limits
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.pool import SandboxPool
from slime.agent.sandbox.protocol import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ExecResult,
    Sandbox,
    SandboxError,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.snapshots import Prepared, Snapshot, by_line

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "ContainerLimits",
    "ContainerSandbox",
    "E2BSandbox",
    "ExecResult",
    "Limits",
    "LocalSandbox",
    "Prepared",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "Snapshot",
    "by_line",
    "ensure_agent_user",
    "exec_and_wait",
]
