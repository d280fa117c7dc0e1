"""Sampling that leaves tokens out, in training: the engine tells which, and the trainer replays it."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class NucleusConfig:
    """Tokens that sampling leaves out. Losses leave them out too: the engine tells which, for each token.

    Attributes:
        replays_nucleus: whether log-probs are those within the nucleus that each token was drawn from.
        nucleus_top_k: of requests; a number in place of -1 where nuclei are replayed, as SGLang wants one.
        nucleus_size: ids of a position that engines are started to tell of.
    """

    rollout_top_p: float = flag(
        1.0, above=0, at_most=1, help="sample among the likeliest tokens that make up this probability"
    )
    rollout_top_k: int = flag(
        -1, at_least=1, also=(-1,), help="sample among the k likeliest tokens; -1 for all"
    )
    replays_nucleus: bool
    nucleus_top_k: int
    nucleus_size: int
