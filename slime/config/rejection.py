"""Rejection sampling: data made by the engines, kept by its reward, and trained on by nobody yet."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """What slime.rollout.rejection_sampling writes."""

    rejection_output: str | None = flag(
        place=True,
        help="directory of the accepted samples, one file per rollout; a run goes on where it ended",
    )
    rejection_format: Literal["jsonl", "parquet"] = flag("jsonl", help="kind of these files")
    rejection_min_reward: float = flag(1.0, at_least=-1e6, help="samples of a lower reward are rejected")
    rejection_max_per_prompt: int | None = flag(
        above=0, help="most samples of one prompt, those of the highest reward first"
    )
