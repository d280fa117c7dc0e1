"""What tests of the FSDP trainer share: its flags, and steps whose outcome can be compared."""

from argparse import Namespace
from pathlib import Path

import torch

from slime.ray.train_worker import TrainWorker
from tests.trainer_batches import split, trainer_args

_FLAGS = dict(
    train_backend="fsdp",
    gradient_checkpointing=False,
    attn_implementation="flash_attention_2",
    fsdp_cpu_offload=False,
    trust_remote_code=False,
    only_train_params_name_list=None,
    freeze_params_name_list=None,
    freeze_indexer=False,
)


def fsdp_args(hf_checkpoint: Path | str, **overrides) -> Namespace:
    """The ``args`` of a float32 FSDP trainer; override any of them."""
    return trainer_args(hf_checkpoint, **{**_FLAGS, **overrides})


def weights_of(worker: TrainWorker) -> dict[str, torch.Tensor]:
    """All weights under Hugging Face names. Collective."""
    buckets = worker.backend.weights().buckets(100_000)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def train(rank: int, args: Namespace, rollouts: list[dict]) -> dict:
    """Trains on the rollouts; the main rank's metrics and, on every rank, the weights."""
    worker = TrainWorker(args)
    worker.start()
    reports = []
    for rollout_id, rollout in enumerate(rollouts):
        report = worker.train_shard(rollout_id, split(args, rollout, worker.parallel_config()))[0]
        reports.append([report["train"], report["rollout"]] if report else [])
    return {"reports": reports, "weights": weights_of(worker)}
