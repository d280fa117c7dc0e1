"""The KL to a reference model."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """The KL to the reference model, in the loss or in the reward."""

    use_kl_loss: bool = flag(False, help="add the KL to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, at_least=0, help="weight of the KL in the loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", help="estimator of the KL; as a loss k1 has a gradient only with --use-unbiased-kl"
    )
    use_unbiased_kl: bool = flag(False, help="weight the KL with the importance ratio")
    kl_coef: float = flag(0.0, at_least=0, help="weight of the KL in the reward")
    ref_load: str | None = flag(place=True, help="checkpoint of the reference model; default --hf-checkpoint")
    ref_ckpt_step: int | None = flag(at_least=0, help="iteration of --ref-load")
    ref_update_interval: int | None = flag(
        above=0, help="rollouts after which the reference becomes the actor"
    )
