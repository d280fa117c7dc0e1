"""The slice of the policy loss."""

from dataclasses import dataclass
from typing import Any

from slime.config.kl import KlConfig
from slime.config.loss import LogitsConfig, LossConfig
from slime.config.off_policy import OffPolicyConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What the policy loss reads.

    Attributes:
        flat: the run's ``args``, for hooks of users alone.
    """

    loss: LossConfig
    kl: KlConfig
    off_policy: OffPolicyConfig
    logits: LogitsConfig
    flat: Any
