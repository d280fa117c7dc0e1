"""Which samples of a rollout are trained on: not those of models that are served beside the trained ones."""

from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.run import RunConfig
from slime.rollout.attempts import flatten
from slime.rollout.base_types import RolloutError
from slime.utils.types import Sample, name_samples


def trained_samples(config: GenerationConfig | RunConfig, samples: list[Sample]) -> list[Sample]:
    """The samples without those that a model answered which is served and not trained.

    Raises:
        RolloutError: a recording has samples with a policy, and no served models to tell them by.
    """
    served = [model.name for model in config.engines.served_models]
    if not served and config.debug.load_debug_rollout_data:
        _require_no_policy(samples)
    trained = config.policies.trained_policies or served[:1]
    others = {*served} - {*trained}
    return [sample for sample in samples if sample.policy not in others]


def trained_part(config: GenerationConfig, group: list[Any]) -> list[Any]:
    """A group without what is not trained on, fan-out included; the whole of one that has nothing else."""
    kept = {id(sample) for sample in trained_samples(config, flatten(group))}
    return _part(group, kept) or group


def _part(group: list[Any], kept: set[int]) -> list[Any]:
    parts = (_part(entry, kept) if isinstance(entry, list) else entry for entry in group)
    return [part for part in parts if (part if isinstance(part, list) else id(part) in kept)]


def _require_no_policy(samples: list[Sample]) -> None:
    for sample in samples:
        if sample.policy is not None:
            raise RolloutError(
                f"{name_samples(sample)}: policy is {sample.policy!r}, and a run without engines cannot tell "
                "whether it was trained on (wanted: --load-debug-rollout-data of samples without a policy)"
            )
