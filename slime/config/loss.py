"""The loss."""

from dataclasses import dataclass

from slime.config.flag import flag, path_flag

LOSSES = {
    "policy_loss": "slime.training.losses.policy.policy_loss_function",
    "sft_loss": "slime.training.losses.sft.sft_loss_function",
    "value_loss": "slime.training.losses.value.value_loss_function",
}
"""What ``--loss-type`` names, beside the user's own: fn(args, batch, logits, sum_of_sample_mean)."""
_SURROGATES = "slime.training.losses.surrogates."
SURROGATES = {
    "ppo": f"{_SURROGATES}ppo.clipped_surrogate",
    "gspo": f"{_SURROGATES}gspo.sequence_surrogate",
    "cispo": f"{_SURROGATES}cispo.weighted_surrogate",
}
"""What ``--surrogate`` names: fn(config, tokens), see ``slime.training.losses.surrogates``."""
# What a role has of its own, whatever --loss-type says.
_OF_ROLES = ("value_loss",)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss, how it is reduced, and how it is computed.

    Attributes:
        surrogate_function_path: dotted path of the surrogate.
    """

    loss_type: str = flag(
        "policy_loss",
        choices=(*(name for name in LOSSES if name not in _OF_ROLES), "custom_loss"),
        help="which loss",
    )
    custom_loss_function_path: str | None = path_flag("fn(args, batch, logits, sum_of_sample_mean)")
    surrogate: str = flag(
        choices=tuple(SURROGATES),
        help="what the policy loss minimises; default gspo or cispo with --advantage-estimator of that name, "
        "else ppo",
    )
    eps_clip: float = flag(0.2, at_least=0, help="lower PPO clip range")
    eps_clip_high: float = flag(at_least=0, help="upper PPO clip range; default --eps-clip")
    eps_clip_c: float | None = flag(above=1, help="dual-clip constant, above 1")
    value_clip: float = flag(0.2, at_least=0, help="how far a critic's values move without being clipped")
    entropy_coef: float = flag(
        0.0, at_least=-10, at_most=10, help="weight of the entropy bonus; below 0 a penalty"
    )
    custom_pg_loss_reducer_function_path: str | None = path_flag(
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer"
    )
    recompute_loss_function: bool = flag(False, help="recompute the loss in backward to save memory")
    log_probs_chunk_size: int = flag(
        -1,
        at_least=1,
        also=(0, -1),
        help="rows per chunk of the log-prob computation; 0 or less for as many as suit the device",
    )
    pg_loss_denominator: float | None = flag(
        at_least=1,
        help="sums of the policy gradient over a rollout are divided by this instead of its length",
    )
    calculate_per_token_loss: bool = flag(False, help="mean over tokens instead of over samples")
    surrogate_function_path: str


@dataclass(frozen=True, kw_only=True)
class LogitsConfig:
    """How logits become probabilities: values of several groups, which belong together where they are read.

    Attributes:
        rollout_temperature: what logits are divided by.
        vocab_size: tokens that exist; further columns are padding.
        log_probs_chunk_size: rows at a time.
        replays_nucleus: log-probs are those within the nucleus that the engine drew from.
    """

    rollout_temperature: float
    vocab_size: int
    log_probs_chunk_size: int
    replays_nucleus: bool
