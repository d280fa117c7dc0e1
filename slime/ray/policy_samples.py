"""What the trainer of a policy is given of a rollout."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.run import RunConfig
from slime.observability.metric_utils import dict_add_prefix
from slime.observability.policy_log import of_policy
from slime.observability.rollout_metrics import metrics_of_samples
from slime.rollout.weight_versions import check_weight_versions
from slime.training.batch import BatchError
from slime.training.conversion import (
    check_lengths,
    left_out,
    mean_raw_reward,
    samples_to_train_data,
    split_train_data_by_dp,
)
from slime.utils.types import RolloutBatch, Sample, name_samples

logger = logging.getLogger(__name__)


def samples_of_policies(policies: Sequence[str], samples: list[Sample]) -> dict[str, list[Sample]]:
    """The samples of each of several policies, by their ``policy``.

    Raises:
        BatchError: a sample is of no policy, or of one that the run does not train.
    """
    found: dict[str, list[Sample]] = {name: [] for name in policies}
    for sample in samples:
        if sample.policy not in found:
            raise BatchError(
                f"{name_samples(sample)}: policy is {sample.policy!r} (wanted: {' or '.join(policies)}, as "
                "--policies names them)"
            )
        found[sample.policy].append(sample)
    return found


class PolicySamples:
    """Makes the train shards of one policy out of its samples.

    Attributes:
        config: the policy's.
        parallel_config: of its trainer; None without one.
        weight_version: that its engines were sent last; None before the first.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.parallel_config: dict[str, int] | None = None
        self.weight_version: str | None = None

    def check_versions(self, samples: list[Sample]) -> None:
        """Refuses samples that other weights have made than those of the last update."""
        if self.weight_version is not None:
            allow_older = self.config.rollout.partial_rollout
            check_weight_versions(samples, self.weight_version, allow_older=allow_older)

    def check_batch(self, origin: str, samples: list[Sample]) -> None:
        """Checks the samples of a batch before metrics are made of them, which would fail with less to say.

        Args:
            origin: what made them, for messages.
        """
        if self.parallel_config is None:
            return
        if not samples:
            name = self.config.policies.policy_name
            whose = f" of policy {name}" if name else ""
            raise RuntimeError(f"{origin} returned no sample{whose}, wanted some to train on")
        if not self.config.batches.custom_convert_samples_to_train_data_path:
            check_lengths(samples, self.config.model.vocab_size)

    def metrics(self, samples: list[Sample]) -> dict[str, Any]:
        """Lengths, rewards and the like of the policy's samples."""
        return dict_add_prefix(metrics_of_samples(self.config, samples), "rollout/")

    def to_train_shards(
        self, samples: list[Sample], data_source: Any
    ) -> tuple[list[RolloutBatch], dict[str, float]]:
        """The shards, and metrics: what is in none of them, and the reward of what is.

        The conversion says what the reward was, which need not be the number that the sample has.

        Args:
            data_source: in whose books is what is left out; None where the others of a group may be trained.
        """
        if self.parallel_config is None:
            return [], {}
        batch = samples_to_train_data(self.config, samples)
        shards = split_train_data_by_dp(self.config, batch, self.parallel_config)
        metrics = mean_raw_reward(batch, shards) | self.book_left_out(samples, batch, shards, data_source)
        return shards, metrics

    def book_left_out(
        self, samples: list[Sample], batch: RolloutBatch, shards: list[RolloutBatch], data_source: Any
    ) -> dict[str, int]:
        """Takes what is in no shard out of the books of trained groups, and counts its rollouts."""
        positions = set(left_out(batch, shards))
        if not positions:
            return {}
        rollouts = len({batch["rollout_ids"][position] for position in positions})
        logger.warning(
            "%d rollouts fill no optimizer step of --global-batch-size %d and are not trained",
            rollouts,
            self.config.batches.global_batch_size,
        )
        ledger = getattr(data_source, "ledger", None)
        # A conversion of the user's may have made other samples, and a recording is from another run.
        if ledger and len(samples) == len(batch["tokens"]) and not self.config.debug.load_debug_rollout_data:
            groups = {sample.group_index for sample in samples}
            trained = {s.group_index for i, s in enumerate(samples) if i not in positions}
            ledger.drop_trained(len(groups - trained))
        return {"rollout/dropped/no_step": rollouts}


class PolicyBatches(dict[str, PolicySamples]):
    """What makes the train shards of each policy, by its name.

    Args:
        configs: of all policies that are trained.
    """

    def __init__(self, configs: Mapping[str, RunConfig]) -> None:
        super().__init__({name: PolicySamples(own) for name, own in configs.items()})

    def split(self, samples: list[Sample]) -> dict[str, list[Sample]]:
        """The samples of each policy; where there are several, each says whose it is."""
        if len(self) == 1:
            return dict.fromkeys(self, samples)
        return samples_of_policies(list(self), samples)

    def to_train_shards(
        self, of_policies: Mapping[str, list[Sample]], data_source: Any
    ) -> tuple[list[RolloutBatch], dict[str, float]]:
        """The shards of one policy after the other, and metrics of them."""
        several, shards, metrics = len(of_policies) > 1, list[RolloutBatch](), dict[str, float]()
        for name, samples in of_policies.items():
            # A group of which one policy leaves something out is another's to train on.
            books = None if several else data_source
            own, found = self[name].to_train_shards(samples, books)
            if several:
                # The reward of what is trained is told as the conversion has it.
                found = of_policy(name, self[name].metrics(samples) | found)
            shards += own
            metrics |= found
        return shards, metrics
