"""One trainer rank on recorded rollouts: what a Ray actor does, without Ray."""

import hashlib
from typing import Any

import torch

from slime.arguments import validated_args
from slime.backends.megatron_utils.named_params import named_params
from slime.config.run import run_config
from slime.observability.rollout_data_utils import load_debug_rollout_data
from slime.ray.train_worker import TrainWorker
from slime.training.conversion import samples_to_train_data, split_train_data_by_dp

_CLOCKS = ("perf/",)


def train_recorded(rank: int, argv: list[str], num_rollouts: int) -> dict[str, Any]:
    """Metrics of this rank (empty but on the main one) and digests of its weights after the last step."""
    args = validated_args(argv)
    worker, run = TrainWorker(args), run_config(args)
    worker.start()
    config = worker.parallel_config()
    steps: list[dict[str, Any]] = []
    rollouts: list[dict[str, Any]] = []
    for rollout_id in range(num_rollouts):
        samples = load_debug_rollout_data(args.load_debug_rollout_data, rollout_id=rollout_id)
        shards = split_train_data_by_dp(run, samples_to_train_data(run, samples), config)
        report, _ = worker.train_shard(rollout_id, shards[config["dp_rank"]])
        if report:
            steps += report["train"]
            rollouts.append(report["rollout"])
    digest, square_sum = hashlib.sha256(), 0.0
    for name, param in named_params(worker.backend.state.model):
        value = param.detach()
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        square_sum += float(value.double().square().sum())
    return {"steps": steps, "rollouts": rollouts, "sha256": digest.hexdigest(), "square_sum": square_sum}
