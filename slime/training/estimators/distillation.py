"""On-policy distillation: the student's own tokens, judged by a teacher."""

import torch

from slime.config.distillation import DistillationConfig
from slime.utils.types import RolloutBatch


def apply_opd_kl_to_advantages(
    config: DistillationConfig,
    rollout_data: RolloutBatch,
    advantages: list[torch.Tensor],
    student_log_probs: list[torch.Tensor] | None,
) -> None:
    """A_t - ``opd_kl_coef`` * (log p_student - log p_teacher), in place of each entry of ``advantages``.

    The difference is the k1 estimate of KL(student || teacher) at a token that the student drew, given what
    stands before it; as a part of the advantage it has that KL's gradient. It is kept as ``opd_reverse_kl``.

    Raises:
        ValueError: the batch has no log-probs of the teacher, or none of the student.
    """
    teacher = rollout_data.get("teacher_log_probs")
    if teacher is None:
        raise ValueError(
            f"--use-opd --opd-type {config.opd_type}: the rollout has no teacher_log_probs "
            "(docs/algorithms/distillation.md says which functions make them)"
        )
    if student_log_probs is None:
        raise ValueError("--use-opd: the rollout has no log-probs of the student")
    reverse_kl = [own - other for own, other in zip(student_log_probs, teacher, strict=True)]
    rollout_data["opd_reverse_kl"] = reverse_kl
    for i, difference in enumerate(reverse_kl):
        advantages[i] = advantages[i] - config.opd_kl_coef * difference
