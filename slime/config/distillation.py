"""On-policy distillation."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """On-policy distillation: the KL to a teacher, taken off the advantages."""

    use_opd: bool = flag(False, help="take the KL to a teacher off the advantages")
    opd_type: Literal["sglang", "megatron"] | None = flag(
        help="where the teacher is: behind an engine at --rm-url, or in the trainer"
    )
    opd_kl_coef: float = flag(1.0, at_least=0, help="weight of the KL to the teacher")
    opd_teacher_load: str | None = flag(place=True, help="checkpoint of a teacher in the trainer")
    opd_teacher_ckpt_step: int | None = flag(at_least=0, help="iteration of --opd-teacher-load")
