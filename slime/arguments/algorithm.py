"""Flags: the loss, the advantages and the corrections."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, path_flag, refused

GROUP_SCALED = ("grpo", "gspo", "cispo")
"""Estimators that centre rewards on the mean of a prompt's samples and divide by their deviation."""
GROUP_CENTRED = (*GROUP_SCALED, "reinforce_plus_plus_baseline")
ADVANTAGE_ESTIMATORS = (*GROUP_CENTRED, "reinforce_plus_plus")


@dataclass(frozen=True)
class LossArgs:
    """The policy loss and what is added to it."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag("policy_loss", help="which loss")
    custom_loss_function_path: str | None = path_flag("fn(args, batch, logits, sum_of_sample_mean)")
    eps_clip: float = flag(0.2, help="lower PPO clip range")
    eps_clip_high: float | None = flag(help="upper PPO clip range; default --eps-clip")
    eps_clip_c: float | None = flag(help="dual-clip constant, above 1")
    value_clip: float = refused(0.2, help="clip range of the value loss")
    entropy_coef: float = flag(0.0, help="weight of the entropy bonus")
    use_kl_loss: bool = flag(False, help="add the KL to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, help="weight of the KL in the loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("k1", help="estimator of the KL")
    use_unbiased_kl: bool = flag(False, help="weight the KL with the importance ratio")
    kl_coef: float = flag(0.0, help="weight of the KL in the reward")
    ref_load: str | None = flag(help="checkpoint of the reference model; default --hf-checkpoint")
    ref_ckpt_step: int | None = flag(help="iteration of --ref-load")
    ref_update_interval: int | None = flag(help="rollouts after which the reference becomes the actor")
    custom_pg_loss_reducer_function_path: str | None = path_flag(
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer"
    )


@dataclass(frozen=True)
class AdvantageArgs:
    """From rewards to advantages."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = flag("grpo", supported=ADVANTAGE_ESTIMATORS, help="how advantages are made")
    disable_compute_advantages_and_returns: bool = flag(
        False, help="no advantages, as for SFT; sets compute_advantages_and_returns to False"
    )
    custom_advantage_function_path: str | None = path_flag(
        "fn(args, rollout_data) sets advantages and returns"
    )
    gamma: float = flag(1.0, help="discount")
    lambd: float = refused(1.0, help="lambda of GAE, used by ppo only")
    normalize_advantages: bool = flag(False, help="whiten advantages over the batch")
    disable_grpo_std_normalization: bool = flag(
        False, help="do not divide by the group's standard deviation; sets grpo_std_normalization to False"
    )
    disable_rewards_normalization: bool = flag(
        False, help="train on raw rewards; sets rewards_normalization to False"
    )
    num_critic_only_steps: int = refused(0, help="rollouts before the actor starts to train")


@dataclass(frozen=True)
class OffPolicyArgs:
    """Corrections for the gap between trainer and engine, and between old and new policy."""

    use_rollout_entropy: bool = flag(False, help="compute the entropy in the log-prob pass")
    get_mismatch_metrics: bool = flag(False, help="log the gap between trainer and engine")
    use_rollout_logprobs: bool = flag(False, help="the engine's log-probs are the old policy's")
    use_tis: bool = flag(False, help="truncated importance sampling between engine and trainer")
    tis_clip: float = flag(2.0, help="upper bound of the importance weight")
    tis_clip_low: float = flag(0.0, help="lower bound of the importance weight")
    custom_tis_function_path: str | None = path_flag("replaces truncated importance sampling")
    use_opsm: bool = flag(False, help="mask sequences that drifted and have a negative advantage")
    opsm_delta: float = flag(1e-4, help="sequence KL above which --use-opsm masks")
    reset_optimizer_states: bool = flag(False, help="zero Adam's moments before each rollout's steps")
    use_stateless_adam: bool = refused(False, help="optimizer without moments")
    use_routing_replay: bool = refused(False, help="replay the trainer's MoE routing")
    use_rollout_routing_replay: bool = refused(False, help="replay the engine's MoE routing")
    use_opd: bool = refused(False, help="on-policy distillation")
    opd_type: Literal["sglang", "megatron"] | None = refused(help="who runs the teacher")
    opd_kl_coef: float = refused(1.0, help="weight of the KL to the teacher")
    opd_teacher_load: str | None = refused(help="checkpoint of the teacher")
    opd_teacher_ckpt_step: int | None = refused(help="iteration of the teacher's checkpoint")
