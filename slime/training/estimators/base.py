"""What an estimator is."""

from argparse import Namespace
from collections.abc import Callable

import torch

from slime.utils.types import RolloutBatch

Estimator = Callable[[Namespace, RolloutBatch], list[torch.Tensor]]
"""Returns of a rank's shard, per sample [R] float32, which are its advantages too. The shard has ``rewards``
(normalised within the group, where that is asked for), ``kl`` and ``loss_masks``."""
