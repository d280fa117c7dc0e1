"""A teacher behind an engine: its log-probs of the student's tokens, in place of a reward.

--use-opd --opd-type sglang --rm-url http://TEACHER:PORT/generate
--custom-rm-path slime.rollout.on_policy_distillation.reward_func
--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards

Without ``--rm-url`` the model ``teacher`` of ``--sglang-config`` is asked.
"""

from typing import Any

from slime.arguments.groups.distillation import TEACHER_MODEL
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.base_types import RolloutError, name_samples
from slime.rollout.generation import get_model_url
from slime.rollout.rm_hub.remote import post_json
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """What the teacher answers about the sample's tokens: nothing is generated.

    It is asked at ``--rm-url``, else behind the router of the model ``teacher`` of this run.
    """
    config = filled(GenerationConfig, args)
    if config.rewards.rm_url is None and TEACHER_MODEL not in config.router.sglang_model_routers:
        raise ValueError("--rm-url: not given, expected the address of the teacher's /generate")
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": config.rollout.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if config.rewards.rm_url is None:
        return await post(get_model_url(config.router, TEACHER_MODEL), payload)
    return await post_json(config.rewards.rm_url, payload, allowed_hosts=config.rewards.allowed_hosts)


def post_process_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Takes ``teacher_log_probs`` off the teacher's answers; the rewards themselves are 0.

    Raises:
        RolloutError: an answer has not one log-prob for each token of a response.
    """
    for sample in samples:
        sample.teacher_log_probs = _response_log_probs(sample)
    return [0.0] * len(samples), [0.0] * len(samples)


def _response_log_probs(sample: Sample) -> list[float]:
    answer: Any = sample.reward
    try:
        entries = answer["meta_info"]["input_token_logprobs"][1:]  # nothing is before the first
        log_probs = [float(entry[0]) for entry in entries]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise RolloutError(
            f"{name_samples(sample)}: the teacher's answer lacks log-probs of its input: {answer!r:.200}"
        ) from error
    if len(log_probs) != len(sample.tokens) - 1:
        raise RolloutError(
            f"{name_samples(sample)}: the teacher gave {len(log_probs)} log-probs for {len(sample.tokens)} "
            "tokens, expected one less"
        )
    return log_probs[len(log_probs) - sample.response_length :]
