"""Weights of the trainer, under Hugging Face names, to the rollout engines.

    updater = UpdateWeightFromTensor(args, model)      # on every trainer rank
    updater.connect_rollout_engines(endpoints)
    metrics = updater.update_weights(version=1)

`HfWeightIterator` gathers the model bucket by bucket; a sender carries each bucket to its engines
(`TensorSender` by a handle on the same host, `DistributedSender` by broadcast); `WeightUpdater` runs the
session around it: pause, flush, begin, buckets, end, continue.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.update_weight.distributed_sender import DistributedSender
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import HfWeightIterator
from slime.backends.megatron_utils.update_weight.tensor_sender import TensorSender
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater

__all__ = ["HfWeightIterator", "UpdateWeightFromDistributed", "UpdateWeightFromTensor", "WeightUpdater"]


class UpdateWeightFromDistributed(WeightUpdater):
    """For engines on GPUs of their own: bucketed broadcasts."""

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module]) -> None:
        super().__init__(args, model, [DistributedSender(args)])


class UpdateWeightFromTensor(WeightUpdater):
    """For engines on the trainer's GPUs: hand-over on the host; broadcasts to engines beyond them."""

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module]) -> None:
        super().__init__(args, model, [TensorSender(args), DistributedSender(args)])
