"""Evaluation: every prompt of every eval set, with sampling parameters of its own."""

import asyncio
import copy
import logging
from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from typing import Any

import orjson

from slime.config.generation import GenerationConfig
from slime.config.rewards import RewardConfig
from slime.config.run import filled
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput
from slime.rollout.checks import check_samples
from slime.rollout.generate_state import GenerateState, params_for_sample
from slime.rollout.generation import generate_and_rm, is_given_up
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.ungraded import FAILURE, fill_ungraded, nothing_is_graded
from slime.utils.async_utils import gather_or_cancel
from slime.utils.data import Dataset
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
_datasets: dict[Any, Dataset] = {}


async def eval_rollout(args: Any, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all of ``args.eval_datasets`` at once.

    Raises:
        RolloutError: user code failed on a sample, or ``args.rollout_timeout`` seconds have passed.
    """
    config = filled(GenerationConfig, args)
    if config.rewards.group_rm:
        raise RolloutError("--group-rm: not supported by evaluation, which scores samples one by one")
    set_current_rollout_id(rollout_id)
    GenerateState(args).reset()
    try:
        async with asyncio.timeout(config.cluster.rollout_timeout):
            results = await gather_or_cancel(
                eval_rollout_single_dataset(args, rollout_id, one) for one in config.evaluation.eval_datasets
            )
    except TimeoutError as error:
        names = ", ".join(one.name for one in config.evaluation.eval_datasets)
        raise RolloutError(
            f"evaluation of {names} at rollout {rollout_id} did not finish within "
            f"{config.cluster.rollout_timeout:g} s (args.rollout_timeout)"
        ) from error
    data = {name: data for result in results for name, data in result.items()}
    return RolloutFnEvalOutput(data=data, metrics=_prompts_too_long(config) | _given_up(data))


def _prompts_too_long(config: GenerationConfig) -> dict[str, int]:
    """A score over a part of a set is another score."""
    counts = {one.name: _load_dataset(config, one).num_too_long for one in config.evaluation.eval_datasets}
    return {f"eval/{name}/prompts_too_long": count for name, count in counts.items() if count}


def _given_up(data: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Handles samples that were given up like failed ones."""
    counts = {name: len(result["given_up"]) for name, result in data.items()}
    return {f"eval/{name}/given_up": count for name, count in counts.items() if count}


async def eval_rollout_single_dataset(
    args: Any, rollout_id: int, dataset_cfg: Any
) -> dict[str, dict[str, Any]]:
    """``{name: {rewards, truncated, samples, given_up}}`` of one eval set, in the order of its prompts.

    Samples that a generate function aborted have no reward; they are in ``given_up`` alone.

    Raises:
        RolloutError: all samples were given up, or none could be graded.
    """
    config = filled(GenerationConfig, args)
    samples = _make_samples(_load_dataset(config, dataset_cfg), dataset_cfg)
    params = eval_sampling_params(args, dataset_cfg)
    results = await gather_or_cancel(
        generate_and_rm(args, sample, params_for_sample(config.rollout, params, sample), evaluation=True)
        for sample in samples
    )
    made = [s for result in results for s in (result if isinstance(result, list) else [result])]
    check_samples(f"eval set {dataset_cfg.name}: its generate function", made)
    given_up = [sample for sample in made if is_given_up([sample])]
    done = _graded(dataset_cfg.name, [sample for sample in made if not is_given_up([sample])])
    return {
        dataset_cfg.name: {
            "rewards": [reward_number(config.rewards, sample) for sample in done],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in done],
            "samples": done,
            "given_up": given_up,
        }
    }


def _graded(name: str, samples: list[Sample]) -> list[Sample]:
    """The samples of the prompts of which at least one answer could be graded.

    Raises:
        RolloutError: there is none.
    """
    if not samples:
        raise RolloutError(f"eval set {name}: every sample was aborted by its generate function")
    by_prompt: dict[int | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.group_index].append(sample)
    for group in by_prompt.values():
        fill_ungraded(group)
    left = {index for index, group in by_prompt.items() if not nothing_is_graded(group)}
    if not left:
        raise RolloutError(f"eval set {name}: no answer could be graded: {samples[0].metadata[FAILURE]}")
    if dropped := len(by_prompt) - len(left):
        logger.warning(
            "eval set %s: %d prompts left out, none of their answers could be graded", name, dropped
        )
    return [sample for sample in samples if sample.group_index in left]


def reward_number(config: RewardConfig, sample: Sample) -> Any:
    """The number: an eval set may be scored by a function of its own, which needs no key."""
    key = config.eval_reward_key or config.reward_key
    if not key or isinstance(sample.reward, Real):
        return sample.reward
    if not isinstance(sample.reward, dict) or key not in sample.reward:
        flag = "--eval-reward-key" if config.eval_reward_key else "--reward-key"
        raise RolloutError(
            f"{flag} {key}: eval sample {sample.index} has reward {sample.reward!r} "
            "(wanted: a number, or a dict with that key)"
        )
    return sample.reward[key]


def _make_samples(dataset: Dataset, config: Any) -> list[Sample]:
    samples: list[Sample] = []
    for group_index, prompt in enumerate(dataset.samples):
        for _ in range(config.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.index = len(samples)
            sample.group_index = group_index
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path
            samples.append(sample)
    return samples


def eval_sampling_params(args: Any, config: Any) -> dict[str, Any]:
    """``sampling_params`` of /generate for an eval set; what it leaves open is as in training."""
    params = dict(GenerateState(args).sampling_params)
    own = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": config.no_stop_trim,
        "repetition_penalty": config.repetition_penalty,
        "min_new_tokens": config.min_new_tokens,
    }
    return params | {key: value for key, value in own.items() if value is not None}


def _load_dataset(config: GenerationConfig, dataset: Any) -> Dataset:
    template_kwargs = dataset.apply_chat_template_kwargs or {}
    tokenizer = config.hf_checkpoint.hf_checkpoint
    key = (*dataset.cache_key, tokenizer, dataset.apply_chat_template, orjson.dumps(template_kwargs))
    if key not in _datasets:
        _datasets[key] = Dataset(
            dataset.path,
            GenerateState(config.flat).tokenizer,
            max_length=config.evaluation.eval_max_prompt_len,
            prompt_key=dataset.input_key,
            label_key=dataset.label_key,
            tool_key=dataset.tool_key,
            metadata_key=dataset.metadata_key,
            apply_chat_template=dataset.apply_chat_template,
            apply_chat_template_kwargs=template_kwargs,
        )
        for line in _datasets[key].too_long(f"--eval-max-prompt-len {config.evaluation.eval_max_prompt_len}"):
            logger.warning("eval dataset %s: %s", dataset.name, line)
    return _datasets[key]
