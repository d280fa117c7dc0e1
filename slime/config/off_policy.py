"""Corrections for data of another policy than the one that is trained."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, path_flag

_LOSSES = "slime.training.losses."
CORRECTIONS = {
    "tis": f"{_LOSSES}corrections.vanilla_tis_function",
    "icepop": f"{_LOSSES}corrections.icepop_function",
    "mis": f"{_LOSSES}mis.mis_function",
}
"""What ``--tis-type`` names."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Corrections for the gap between trainer and engine, and between old and new policy.

    Attributes:
        tis_function_path: dotted path; see `slime.training.losses.corrections`.
        tis_needs_mean: whether the mean weight of each optimizer step is to be known before it.
        records_routes: whether the pass of old log-probs records routes, as with R2 alone.
    """

    use_rollout_entropy: bool = flag(False, help="compute the entropy in the log-prob pass")
    get_mismatch_metrics: bool = flag(False, help="log the gap between trainer and engine")
    use_rollout_logprobs: bool = flag(False, help="the engine's log-probs are the old policy's")
    use_tis: bool = flag(False, help="truncated importance sampling between engine and trainer")
    tis_clip: float = flag(2.0, above=0, help="upper bound of the importance weight")
    tis_clip_low: float = flag(0.0, at_least=0, help="lower bound of the importance weight")
    tis_type: Literal["tis", "icepop", "mis"] | None = flag(
        help="the correction of --use-tis: truncated importance sampling (the default), IcePop, or MIS"
    )
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token", help="MIS: whose importance weight; of a sequence the product or the geometric mean"
    )
    tis_mode: Literal["truncate", "clip", "mask"] = flag(
        "truncate", help="MIS: bound weights above, bound them on both sides, or drop those out of bounds"
    )
    tis_upper_bound: float = flag(2.0, above=0, help="MIS: upper bound of the weight")
    tis_lower_bound: float = flag(
        at_least=0, help="MIS: lower bound of the weight; default 1 / --tis-upper-bound"
    )
    tis_batch_normalize: bool = flag(False, help="MIS: divide weights by their mean over the optimizer step")
    use_rs: bool = flag(False, help="MIS: reject tokens or sequences whose weight is out of bounds")
    rs_level: Literal["token", "sequence", "geometric"] = flag(
        "token", help="MIS: whose weight --use-rs looks at"
    )
    rs_upper_bound: float = flag(above=0, help="MIS: upper bound of --use-rs; default --tis-upper-bound")
    rs_lower_bound: float = flag(
        at_least=0, help="MIS: lower bound of --use-rs; default 1 / --rs-upper-bound"
    )
    rs_veto_threshold: float | None = flag(
        above=0, help="MIS: reject a sequence with a token whose weight is below this"
    )
    custom_tis_function_path: str | None = path_flag("replaces the correction of --use-tis")
    keep_old_actor: bool = flag(
        False, help="take old log-probs of the weights that the engines had, not of those that train"
    )
    use_opsm: bool = flag(False, help="mask sequences that drifted and have a negative advantage")
    opsm_delta: float = flag(1e-4, at_least=0, help="sequence KL above which --use-opsm masks")
    reset_optimizer_states: bool = flag(False, help="zero Adam's moments before each rollout's steps")
    use_routing_replay: bool = flag(
        False, help="train with the experts that the pass of old log-probs chose for each token (R2)"
    )
    use_rollout_routing_replay: bool = flag(
        False, help="compute log-probs and train with the experts that the engine chose for each token (R3)"
    )
    tis_function_path: str
    tis_needs_mean: bool
    records_routes: bool
