"""From rewards to advantages."""

from dataclasses import dataclass, replace

from slime.config.flag import flag, path_flag


@dataclass(frozen=True)
class Estimator:
    """A way from rewards to returns.

    Attributes:
        returns: dotted path of fn(config, shard) -> per sample [R] float32, see `slime.training.estimators`.
        centred: rewards are first centred on the mean of a prompt's samples ...
        scaled: ... and divided by their deviation.
        leaves_one_out: each execution's own reward is left out of the mean that it is centred on.
        penalised: whether the reward has a KL to the reference model in it (``--kl-coef``).
        discounted: whether ``--gamma`` matters.
        whitened: whether advantages have to be whitened over the batch.
        critic: whether it needs values.
        surrogate: the surrogate that its name stands for as well; empty if it goes with any.
    """

    returns: str
    centred: bool = False
    scaled: bool = False
    leaves_one_out: bool = False
    penalised: bool = False
    discounted: bool = False
    whitened: bool = False
    critic: bool = False
    surrogate: str = ""


_GROUP_RELATIVE = Estimator(
    "slime.training.estimators.grpo.group_relative_returns", centred=True, scaled=True
)
_REINFORCE = "slime.training.estimators.reinforce_plus_plus"
ESTIMATORS: dict[str, Estimator] = {
    "grpo": _GROUP_RELATIVE,
    "gspo": replace(_GROUP_RELATIVE, surrogate="gspo"),
    "cispo": replace(_GROUP_RELATIVE, surrogate="cispo"),
    "rloo": Estimator(
        "slime.training.estimators.grpo.group_relative_returns", centred=True, leaves_one_out=True
    ),
    "reinforce_plus_plus": Estimator(
        f"{_REINFORCE}.token_returns", penalised=True, discounted=True, whitened=True
    ),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_REINFORCE}.baseline_returns", centred=True, penalised=True, whitened=True
    ),
    "ppo": Estimator("slime.training.estimators.ppo.gae", penalised=True, discounted=True, critic=True),
}
"""What ``--advantage-estimator`` names."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages.

    Attributes:
        compute_advantages_and_returns, grpo_std_normalization, rewards_normalization: positive names of
            switches that say what is not.
    """

    advantage_estimator: str = flag("grpo", choices=tuple(ESTIMATORS), help="how advantages are made")
    disable_compute_advantages_and_returns: bool = flag(
        False, help="no advantages, as for SFT; sets compute_advantages_and_returns to False"
    )
    custom_advantage_function_path: str | None = path_flag(
        "fn(args, rollout_data) sets advantages and returns"
    )
    gamma: float = flag(1.0, at_least=0, at_most=1, help="discount")
    lambd: float = flag(1.0, at_least=0, at_most=1, help="lambda of GAE, of --advantage-estimator ppo")
    normalize_advantages: bool = flag(False, help="whiten advantages over the batch")
    disable_grpo_std_normalization: bool = flag(
        False, help="do not divide by the group's standard deviation; sets grpo_std_normalization to False"
    )
    disable_rewards_normalization: bool = flag(
        False, help="train on raw rewards; sets rewards_normalization to False"
    )
    compute_advantages_and_returns: bool
    grpo_std_normalization: bool
    rewards_normalization: bool
