"""Multi-token prediction (MTP) layers."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """How many there are, and whether they train."""

    mtp_num_layers: int | None = flag(
        at_least=0, same_as_default=(0,), help="multi-token prediction (MTP) layers; built where they train"
    )
    enable_mtp_training: bool = flag(False, help="train them beside the policy; engines and exports get them")
    mtp_loss_scaling_factor: float = flag(0.2, at_least=0, help="weight of their loss")
