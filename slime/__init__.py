"""RL post-training of language models.

from slime import RunConfig, train

run = train(RunConfig("run.yaml", lr=1e-4))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.cli.api import Run, RunConfig, RunFailed, train

__all__ = ["Run", "RunConfig", "RunFailed", "train"]


def __getattr__(name: str) -> Any:
    """What users of Python need, when they ask for it: every process of a run imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime.cli import api

    return getattr(api, name)
