"""Converts finished samples into what each data-parallel rank trains on.

Plain lists; the trainer makes tensors.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from itertools import count
from numbers import Real
from statistics import fmean
from typing import Any

from slime.adapters.named import adapter_of, unnamed
from slime.config.lora import LoraConfig
from slime.config.training import TrainingConfig
from slime.training.batch import ADAPTER, ADAPTER_STEPS, FIELDS, REQUIRED, BatchError, select
from slime.training.nuclei import check_nuclei
from slime.training.rewards import post_process_rewards
from slime.training.routes import checked_routes
from slime.training.schedule import dp_schedule
from slime.utils.misc import is_finite_number, load_function
from slime.utils.types import RolloutBatch, Sample, name_samples


def samples_to_train_data(config: TrainingConfig, samples: list[Sample]) -> RolloutBatch:
    """Rewards and conversion in one, with the user's functions in place of ours where given.

    Raises:
        BatchError: the samples, or what a function of the user's made of them, are nothing to train on.
    """
    path = config.batches.custom_convert_samples_to_train_data_path
    if path:
        batch = load_function(path)(config.flat, samples)
        if not isinstance(batch, Mapping):
            raise BatchError(f"{path}: returned {batch!r:.100}, wanted a dict of fields")
        if missing := REQUIRED - batch.keys():
            raise BatchError(f"{path}: its result lacks {', '.join(sorted(missing))}")
    else:
        batch = convert_samples_to_train_data(samples, *post_process_rewards(config, samples))
    if config.lora.named_adapters:
        batch = _with_adapters(config.lora, samples, batch)
    _check_values(config, batch, path or config.rewards.custom_reward_post_process_path or "")
    try:
        if config.off_policy.use_rollout_routing_replay:
            batch["rollout_routed_experts"] = checked_routes(config.model, batch)
        if config.logits.replays_nucleus:
            check_nuclei(batch, config.model.vocab_size)
    except ValueError as error:
        raise BatchError(str(error)) from None
    return batch


def _with_adapters(config: LoraConfig, samples: list[Sample], batch: RolloutBatch) -> RolloutBatch:
    """The batch with the name of the adapter of each entry: the sample's, unless a conversion says it."""
    if ADAPTER not in batch:
        _require_entries_of(samples, batch)
        batch = {**batch, ADAPTER: _adapters(config, samples)}
    _check_adapters(config, batch)
    return batch


def _require_entries_of(samples: list[Sample], batch: RolloutBatch) -> None:
    """Refuses entries of which it is not known which samples they were made of."""
    count = len(batch["tokens"])
    own = [sample.index for sample in samples]
    found = batch.get("sample_indices")
    if count != len(samples) or (found is not None and list(found) != own):
        raise BatchError(
            f"{count} entries of {len(samples)} samples, wanted {ADAPTER} among the fields, which names the "
            "adapter of each entry, as they are not those samples in their order"
        )


def _adapters(config: LoraConfig, samples: list[Sample]) -> list[str | None]:
    """The name of each sample's adapter."""
    for sample in samples:
        if reason := unnamed(config, sample.metadata):
            raise BatchError(f"{name_samples(sample)}: {reason}")
    return [adapter_of(config, sample.metadata) for sample in samples]


def _check_adapters(config: LoraConfig, batch: RolloutBatch) -> None:
    """Refuses other names, and a rollout of two adapters: its weight in the loss is one, and each adapter
    has its own mean.
    """
    names = batch[ADAPTER]
    if len(names) != len(batch["tokens"]):
        raise BatchError(f"{ADAPTER}: {len(names)} entries for a batch of {len(batch['tokens'])} samples")
    owners: dict[Any, Any] = {}
    for rollout_id, name in zip(batch["rollout_ids"], names, strict=True):
        if name not in config.named_adapters:
            wanted = ", ".join(config.named_adapters)
            raise BatchError(f"{ADAPTER}: {name!r} (wanted: one of --lora-adapters, {wanted})")
        if owners.setdefault(rollout_id, name) != name:
            raise BatchError(
                f"rollout id {rollout_id}: has samples of the adapters {owners[rollout_id]} and {name}, "
                "wanted one"
            )


def _check_values(config: TrainingConfig, batch: RolloutBatch, made_by: str) -> None:
    """No training on NaN, nor on parts of tokens, whoever made the batch.

    Rewards that only the user's own advantages read may be anything.
    """
    names = batch.get("sample_indices")
    names = range(len(batch["tokens"])) if names is None else names
    origin = f"{made_by}: " if made_by else ""
    for name, reward, mask in zip(names, batch["rewards"], batch["loss_masks"], strict=False):
        if not is_finite_number(reward) and not config.advantages.custom_advantage_function_path:
            raise BatchError(f"{origin}sample {name}: reward {reward!r}, wanted a finite number")
        other = next((value for value in mask if value != 0 and value != 1), None)
        if other is not None:
            raise BatchError(f"{origin}sample {name}: loss mask with {other!r} in it, wanted 0 and 1 only")


def flatten_samples(groups: list[Any]) -> list[Sample]:
    """All samples of a rollout in order, those of a split execution (a list inside a group) included.

    Raises:
        BatchError: something is no sample, the samples of an execution have no rollout id in common, or two
            executions share one.
    """
    owners: dict[int, Hashable] = {}
    flat: list[Sample] = []
    for number, item in enumerate(groups):
        # Without nesting, as in a recording, samples of one group and id come from one execution.
        place = number if isinstance(item, list) else None
        for execution, nested in _executions([item]):
            owner = (place, execution[0].group_index, len(flat) if nested else None)
            rollout_id = _common_id(execution)
            if rollout_id is not None and owners.setdefault(rollout_id, owner) != owner:
                raise BatchError(
                    f"{name_samples(execution)}: rollout id {rollout_id} is that of another execution too, "
                    "expected one for each (a generate function that splits a sample may take its index)"
                )
            flat += execution
    return flat


def in_order(groups: list[Any]) -> list[Sample]:
    """All samples of any nesting, whatever their rollout ids: for an evaluation, which nothing trains on."""
    return [sample for execution, _ in _executions(groups) for sample in execution]


def _executions(items: list[Any], depth: int = 0) -> Iterator[tuple[list[Sample], bool]]:
    """The samples of each execution, and whether they are a list within a group, not a sample by itself."""
    if depth >= 2 and items and all(isinstance(item, Sample) for item in items):
        yield items, True
        return
    for item in items:
        if isinstance(item, list):
            yield from _executions(item, depth + 1)
        elif isinstance(item, Sample):
            yield [item], False
        else:
            raise BatchError(f"{item!r:.100} is among the samples (wanted: Samples and lists of them)")


def _common_id(execution: list[Sample]) -> int | None:
    ids = [sample.rollout_id for sample in execution]
    if len(ids) > 1 and (None in ids or len(set(ids)) > 1):
        raise BatchError(
            f"{name_samples(execution)} come from one execution but have rollout ids {ids}, "
            "expected one common id"
        )
    return ids[0]


def convert_samples_to_train_data(
    samples: list[Sample], raw_rewards: list[float], rewards: list[float]
) -> RolloutBatch:
    """The batch of a rollout: one entry per sample under each key.

    Raises:
        BatchError: a loss mask does not fit its response, or only some samples carry a field, or one has
            media that none takes.
    """
    for sample in samples:
        if lost := sorted(sample.model_inputs.media.keys() - FIELDS.keys()):
            raise BatchError(
                f"{name_samples(sample)}: multimodal_train_inputs has {', '.join(lost)}, which no field of a "
                "batch takes (wanted: samples of text)"
            )
    masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = fill_rollout_ids([sample.rollout_id for sample in samples])
    mask_sums: dict[int, int] = defaultdict(int)
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        mask_sums[rollout_id] += sum(mask)
    batch: RolloutBatch = {
        "rewards": rewards,
        "raw_reward": _reported_rewards(samples, raw_rewards),
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": [mask_sums[rollout_id] for rollout_id in rollout_ids],
    }
    return batch | _read_fields(samples)


def _read_fields(samples: list[Sample]) -> RolloutBatch:
    """The fields that are read off the samples, as far as these have them."""
    batch: RolloutBatch = {}
    for key, field in FIELDS.items():
        if field.read is None:
            continue
        values = [field.read(sample) for sample in samples]
        if all(value is None for value in values):
            continue
        if field.unknown is not None:
            values = [field.unknown(s) if v is None else v for s, v in zip(samples, values, strict=True)]
        missing = [sample for sample, value in zip(samples, values, strict=True) if value is None]
        if missing:
            raise BatchError(f"{name_samples(missing)} have no {key}, but others in the batch do")
        batch[key] = values
    return batch


def _loss_mask(sample: Sample) -> list[int]:
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != sample.response_length:
        raise BatchError(
            f"{name_samples(sample)}: loss mask of {len(mask)} for {sample.response_length} response tokens"
        )
    return [0] * len(mask) if sample.remove_sample else mask


def _reported_rewards(samples: list[Sample], raw_rewards: list[float]) -> list[Any]:
    """Returns rewards for metrics: what the reward function said, where it left that in the metadata."""
    if not any("raw_reward" in sample.metadata for sample in samples):
        return raw_rewards
    return [sample.metadata.get("raw_reward", sample.reward) for sample in samples]


def fill_rollout_ids(rollout_ids: list[int | None]) -> list[int]:
    """Give samples without a rollout id the smallest non-negative ones that are not taken."""
    taken = set(rollout_ids)
    unused = (number for number in count() if number not in taken)
    return [next(unused) if rollout_id is None else rollout_id for rollout_id in rollout_ids]


def check_lengths(samples: list[Sample], vocab_size: int) -> None:
    """Whether what is recorded per response token is there for each, and all tokens are of the model's.

    Raises:
        BatchError: names the sample.
    """
    for sample in samples:
        if not 0 <= sample.response_length < len(sample.tokens):
            raise BatchError(
                f"{name_samples(sample)}: {sample.response_length} response tokens of "
                f"{len(sample.tokens)} in all, wanted fewer"
            )
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(sample, name)
            if values is not None and len(values) != sample.response_length:
                raise BatchError(
                    f"{name_samples(sample)}: {name} of {len(values)} for {sample.response_length} response "
                    "tokens"
                )
        _check_tokens(sample, vocab_size)


def _check_tokens(sample: Sample, vocab_size: int) -> None:
    """Split over ranks, an embedding takes ids beyond its rows for zeros and says nothing."""
    try:
        fine = min(sample.tokens) >= 0 and max(sample.tokens) < vocab_size
    except TypeError:
        fine = False
    if not fine:
        raise BatchError(
            f"{name_samples(sample)}: tokens {sample.tokens!r:.100}, wanted ids from 0 to "
            f"{vocab_size - 1}, as config.json has them"
        )


def left_out(batch: RolloutBatch, shards: list[RolloutBatch]) -> list[int]:
    """Positions in the batch of the samples that no shard has: their rollouts fill no optimizer step."""
    return sorted({*range(len(batch["tokens"]))} - {p for shard in shards for p in shard["partition"]})


def mean_raw_reward(batch: RolloutBatch, shards: list[RolloutBatch]) -> dict[str, float]:
    """``rollout/raw_reward`` of what is trained; nothing where not every reward of the batch is a number."""
    rewards = batch["raw_reward"]
    if not all(isinstance(reward, Real) for reward in rewards):
        return {}
    trained = [float(rewards[position]) for shard in shards for position in shard["partition"]]
    return {"rollout/raw_reward": fmean(trained)}


def split_train_data_by_dp(
    config: TrainingConfig, batch: RolloutBatch, parallel_config: Mapping[str, int]
) -> list[RolloutBatch]:
    """One shard per data-parallel rank: its samples and the schedule of its micro-batches.

    ``raw_reward`` and ``total_lengths`` stay those of the whole batch, which metrics need.

    Args:
        parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
    """
    total_lengths = [len(tokens) for tokens in batch["tokens"]]
    schedule = dp_schedule(
        config.batches,
        config.model,
        parallel_config,
        total_lengths,
        global_batch_size=config.batches.global_batch_size,
        rollout_indices=batch["rollout_ids"],
        adapters=batch.get(ADAPTER),
    )
    return [
        {
            **select(batch, partition),
            "partition": partition,
            "raw_reward": batch["raw_reward"],
            "total_lengths": total_lengths,
            "global_batch_sizes": schedule.global_batch_sizes,
            "num_microbatches": schedule.num_microbatches,
            "micro_batch_indices": indices,
            **({ADAPTER_STEPS: schedule.adapter_steps} if schedule.adapter_steps else {}),
        }
        for partition, indices in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
    ]
