"""The token log."""

from dataclasses import dataclass

from slime.config.flag import flag, place_flag

LOGGED_FUNCTIONS = (
    "slime.rollout.generation.generate",
    "slime.rollout.sglang_rollout.generate",
    "slime.rollout.sglang_streaming_rollout.generate_streaming",
)
"""Generate functions that go on with any part of an answer, and whose answers are logged therefore."""


@dataclass(frozen=True, kw_only=True)
class TokenLogConfig:
    """What a rollout manager leaves to the one that takes its place."""

    token_log_dir: str | None = place_flag(
        "directory in which the rollout manager keeps the answers under way, so that another one goes on "
        "with them; on a disk of all nodes"
    )
    token_log_interval: int = flag(
        512, above=0, help="an engine is asked for so many tokens of an answer at once, which are logged then"
    )
    token_log_max_gb: float = flag(
        8.0, above=0, help="nothing more is logged of a rollout whose log has so many gigabytes"
    )
