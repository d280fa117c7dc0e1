"""Faults that somebody might well make, by name: a module, a piece of it, and what stands there instead."""

_POLICY = "slime/training/losses/policy.py"
_SURROGATES = "slime/training/losses/surrogates/"
_CORRECTIONS = "slime/training/losses/corrections.py"
_MIS = "slime/training/losses/mis.py"
_REDUCERS = "slime/training/losses/reducers.py"
_ADVANTAGES = "slime/training/advantages.py"
_REINFORCE = "slime/training/estimators/reinforce_plus_plus.py"
_GROUPS = "slime/utils/distributed_utils.py"

NAMED: dict[str, tuple[str, str, str]] = {
    "entropy bonus with the wrong sign": (
        _POLICY,
        "pg_loss - config.loss.entropy_coef * entropy",
        "pg_loss + config.loss.entropy_coef * entropy",
    ),
    "dual clip not forwarded": (
        f"{_SURROGATES}ppo.py",
        "config.eps_clip_high, config.eps_clip_c",
        "config.eps_clip_high",
    ),
    "GSPO with the ratio of each token": (
        f"{_SURROGATES}gspo.py",
        "clipped(config, tokens, compute_gspo_kl(tokens.new, tokens.old, tokens.new, tokens.masks))",
        "clipped(config, tokens, torch.cat([*tokens.old]) - torch.cat([*tokens.new]))",
    ),
    "CISPO with the gradient of its ratio": (f"{_SURROGATES}cispo.py", "-clipped.detach()", "-clipped"),
    "OPSM mask not applied": (_POLICY, "torch.where(dropped, 0.0, loss)", "loss"),
    "unbiased KL ignored": (_POLICY, "if config.kl.use_unbiased_kl else", "if False else"),
    "unbiased KL inverted": (
        _POLICY,
        "ratio_of(policy - torch.cat(old))",
        "ratio_of(torch.cat(old) - policy)",
    ),
    "KL in the loss with its arguments swapped": (
        _POLICY,
        'compute_approx_kl(policy, torch.cat(batch["ref_log_probs"])',
        'compute_approx_kl(torch.cat(batch["ref_log_probs"]), policy',
    ),
    "KL in the reward with its arguments swapped": (_ADVANTAGES, "(log_probs, ref,", "(ref, log_probs,"),
    "TIS against the log-probs of the step": (
        _POLICY,
        'train_log_probs=batch.get("log_probs") or [',
        "train_log_probs=[",
    ),
    "TIS against the reference": (
        _POLICY,
        'rollout_log_probs=batch["rollout_log_probs"]',
        'rollout_log_probs=batch.get("ref_log_probs") or batch["rollout_log_probs"]',
    ),
    "TIS with its gradient kept": (_CORRECTIONS, ".detach()", ""),
    "log-probs given to TIS with their gradient": (
        _POLICY,
        'train_log_probs=batch.get("log_probs") or [log_probs.detach() for',
        'train_log_probs=batch.get("log_probs") or [log_probs for',
    ),
    "denominators of the wrong rollout": (
        _REDUCERS,
        "else list(sample_denoms)",
        "else list(sample_denoms)[::-1]",
    ),
    "denominators of the sample, not of its rollout": (
        _REDUCERS,
        'batch.get("rollout_mask_sums")',
        "None",
    ),
    "kl_coef ignored by REINFORCE++": (_REINFORCE, "-kl_coef * kl, 0.0)", "-kl, 0.0)"),
    "kl_coef ignored by the baseline": (_REINFORCE, "- kl_coef * penalty", "- penalty"),
    "no KL in the reward": (_ADVANTAGES, "config.kl.kl_coef == 0 or policy is None", "True"),
    "gamma ignored": (_REINFORCE, "None, None, kl_coef, gamma", "None, None, kl_coef, 1.0"),
    "MIS with its gradient kept": (_MIS, "(train - rollout).detach() for", "(train - rollout) for"),
    "mean weight of a micro-batch": (
        _POLICY,
        "if config.off_policy.tis_needs_mean else {}",
        "if False else {}",
    ),
    "a masked token in the mean of a sequence": (
        _MIS,
        "difference = torch.where(mask != 0, difference, 0.0)",
        "pass",
    ),
    "RLOO with its own reward in the baseline": (
        "slime/training/rewards.py",
        "votes[:number] + votes[number + 1 :]",
        "votes",
    ),
    "whitening over one rank": (
        _GROUPS,
        "if dist.is_initialized():\n        dist.all_reduce(stats",
        "if False:\n        dist.all_reduce(stats",
    ),
    "whitening over the wrong ranks": (
        _ADVANTAGES,
        "(context or ParallelContext.current()).dp_group",
        "(context or ParallelContext.current()).tp_group",
    ),
}
