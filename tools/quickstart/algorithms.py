"""The algorithms that the quickstart's second phase can practise by, as flags after those of grpo.sh."""

_TWO_STEPS = ("--global-batch-size", "128")  # on policy in one step, all ratios would be 1

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": ("--disable-grpo-std-normalization", "--pg-loss-denominator", "24"),
    "dapo": (
        *("--calculate-per-token-loss", "--overlong-buffer-len", "4", "--overlong-penalty-factor", "0.5"),
        *("--dynamic-sampling-filter-path",),
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
        *_TWO_STEPS,
    ),
    "gspo": (
        *("--advantage-estimator", "gspo", "--eps-clip", "0.02", "--eps-clip-high", "0.03"),
        *_TWO_STEPS,
    ),
    "cispo": ("--advantage-estimator", "cispo", "--eps-clip", "1.0", "--eps-clip-high", "0.28", *_TWO_STEPS),
    "rloo": ("--advantage-estimator", "rloo"),
    "reinforce_plus_plus": ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
    "reinforce_plus_plus_baseline": (
        *("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"),
    ),
    "ppo": (
        *("--advantage-estimator", "ppo", "--lambd", "0.95", "--normalize-advantages"),
        *("--critic-lr", "1e-3", "--num-critic-only-steps", "1"),
    ),
    "mis": ("--use-tis", "--tis-type", "mis", "--tis-level", "geometric", "--use-rs", *_TWO_STEPS),
}


def title(algorithm: str) -> str:
    """The name as it is written in a text: DR GRPO."""
    return algorithm.replace("_", " ").upper()
