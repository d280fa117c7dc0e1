"""Gives a sample with a prompt its response and reward."""

import logging
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from slime.adapters.named import adapter_of
from slime.config.generation import GenerationConfig
from slime.config.router import RouterConfig
from slime.config.run import filled
from slime.config.served_models import DEFAULT
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, span_of
from slime.rollout.answer_log import answer_log_of
from slime.rollout.attempts import FINISHED
from slime.rollout.base_types import RolloutError, accepted, awaited, blame, describe, name_samples
from slime.rollout.checks import check_reward, check_samples
from slime.rollout.generate_state import GenerateState, decoder, params_for_sample
from slime.rollout.rm_hub import async_rm, batched_async_rm, grouped_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.ungraded import fill_ungraded, is_ungraded
from slime.utils.addresses import http_url
from slime.utils.async_utils import gather_or_cancel
from slime.utils.cut_stops import StopsAcrossCuts
from slime.utils.engine_meta import fit_versions
from slime.utils.http_utils import asking_adapter, post
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime.utils.weight_clock import clock

logger = logging.getLogger(__name__)

# Of a second each, on top of the router's own: long enough for a worker to come back, short enough
# for a dead router to be reported within half a minute.
GENERATE_RETRIES = 20


def get_model_url(args: RouterConfig, model_name: str = "default", endpoint: str = "/generate") -> str:
    """URL of an endpoint on the router of a model; of the first one if none has that name."""
    routers: Mapping[str, tuple[Any, Any]] = args.sglang_model_routers or {}
    if model_name not in routers and model_name != "default":
        _tell_once(model_name, ", ".join(routers))
    ip, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"{http_url(ip, port)}{endpoint}"


def policy_url(config: GenerationConfig, sample: Sample) -> str:
    """URL of /generate on the router of the model whose answer a sample is, trained or not.

    Raises:
        RolloutError: the run serves no model of that name.
    """
    policies = _known_policies(config)
    if sample.policy is not None and sample.policy not in policies:
        found = " or ".join(policies) or "none, without --policies or --sglang-config"
        raise RolloutError(f"{name_samples(sample)}: policy is {sample.policy!r} (wanted: {found})")
    return get_model_url(config.router, sample.policy or DEFAULT)


def _known_policies(config: GenerationConfig) -> list[str]:
    """The models whose answers samples may be: those that are trained, then others that are served."""
    trained = config.policies.trained_policies
    served = (config.router.sglang_model_routers or {}).keys() - {DEFAULT}
    return [*trained, *sorted(served - trained.keys())]


@cache
def _tell_once(model_name: str, found: str) -> None:
    logger.warning("no model %r is served (found: %s): the first one is asked instead", model_name, found)


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Let the engine answer a prompt, or go on with a response that was aborted.

    ``max_new_tokens`` of ``sampling_params`` counts the whole response, earlier parts included; prompt and
    response are at most ``--rollout-max-context-len`` together, in an evaluation ``--eval-max-context-len``.
    """
    config = filled(GenerationConfig, args)
    payload = prepare_request(config, sample, sampling_params, evaluation)
    if payload is None:
        return sample
    with span_of(args, sample, "sglang_generate") as span:
        url, headers = policy_url(config, sample), routing_headers(config.router, sample)
        output = await post(url, payload, GENERATE_RETRIES, headers=headers)
        span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
    take_answer(args, sample, output, sampling_params)
    return sample


def prepare_request(
    config: GenerationConfig, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> dict[str, Any] | None:
    """The body of /generate for what is left of a sample; None if nothing is, and it is TRUNCATED then.

    Fills in the prompt's tokens. ``sampling_params`` are those of ``generate``.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"status is {sample.status.value}, expected pending or aborted")
    if not sample.tokens:
        sample.tokens = GenerateState(config.flat).encode_prompt(sample)
    params = {key: value for key, value in sampling_params.items() if value is not None}
    params["max_new_tokens"] -= sample.response_length
    longest = config.evaluation.eval_max_context_len if evaluation else config.rollout.rollout_max_context_len
    if longest is not None:
        params["max_new_tokens"] = min(params["max_new_tokens"], longest - len(sample.tokens))
    if params["max_new_tokens"] <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    return {**_of_inputs(sample), "sampling_params": params, **wanted_of_tokens(config.flat, evaluation)}


def _of_inputs(sample: Sample) -> dict[str, Any]:
    """The part of a request that says what the engine's model computes."""
    inputs = sample.model_inputs
    if lost := sorted({*inputs.media, *(sample.multimodal_inputs or {})}):
        raise ValueError(
            f"it has {', '.join(lost)} beside its tokens, and requests hold tokens only (wanted: text, or a "
            "generate function of your own that sends them)"
        )
    return {"input_ids": inputs.ids}


def wanted_of_tokens(args: Any, evaluation: bool = False) -> dict[str, Any]:
    """The part of a request that asks for what training needs to know of each token.

    It also keeps the request from prefixes of older weights, where engines have some.
    """
    config = filled(GenerationConfig, args)
    wanted = {
        "return_logprob": True,
        "return_routed_experts": config.off_policy.use_rollout_routing_replay and not evaluation,
        "return_sampling_mask": config.nucleus.replays_nucleus and not evaluation,
    }
    return {**{name: True for name, is_wanted in wanted.items() if is_wanted}, **clock.cache_key()}


def take_answer(args: Any, sample: Sample, output: dict[str, Any], sampling_params: dict[str, Any]) -> None:
    """Add what /generate answered to the response, up to the end of a stop string that an abort has cut."""
    resumed = sample.response_length > 0
    text_of = decoder(args, sampling_params)
    StopsAcrossCuts(sampling_params.get("stop"), text_of).note(made_before(sample), output)
    tokens, log_probs = read_output_tokens(output)
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=output["meta_info"], text=output["text"]
    )
    if resumed and output["meta_info"].get("finish_reason"):
        sample.prefix_cache_info.add_resumed(output["meta_info"])
    if resumed:
        # A character whose tokens the abort parted is in neither text.
        sample.response = text_of(sample.tokens[-sample.response_length :])


def made_before(sample: Sample) -> list[int]:
    """The tokens at the end of a response that an engine made, with which the next answer goes on.

    What a tool has said has no version. Where no token has one, engines do not tell theirs.
    """
    spans, count = fit_versions(sample.version_spans, sample.response_length), 0
    if all(version is None for version, _ in spans):
        count = sample.response_length
    else:
        for version, length in reversed(spans):
            if version is None:
                break
            count += length
    return sample.tokens[len(sample.tokens) - count :]


def read_output_tokens(output: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probs, of equal length, from an answer of /generate; empty if aborted at once."""
    triples = output["meta_info"].get("output_token_logprobs") or []
    return [triple[1] for triple in triples], [triple[0] for triple in triples]


def routing_headers(config: RouterConfig, sample: Sample) -> dict[str, str] | None:
    if config.router_policy == "consistent_hashing" and sample.session_id:
        return {"X-SMG-Routing-Key": sample.session_id}
    return None


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate for one sample, run the sample hooks and, unless the group is scored as one, the reward.

    A custom generate function may split the sample into a list. A sample that is finished already
    comes back as it is.
    """
    config = filled(GenerationConfig, args)
    masked = config.rollout.partial_rollout and config.rollout.mask_offpolicy_in_partial_rollout
    if masked and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in FINISHED:
        if sample.reward is None and not config.rewards.group_rm and not is_ungraded(sample):
            raise RolloutError(f"{name_samples(sample)} is {sample.status.value} but has no reward")
        return sample
    with asking_adapter(_adapter(config, sample)):
        return await _generate_and_score(config, sample, sampling_params, evaluation)


async def _generate_and_score(
    config: GenerationConfig, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    args, state = config.flat, GenerateState(config.flat)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with span_of(args, sample, "generate"):
            result = await _generate_one(config, sample, sampling_params, evaluation)
        result = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    _check_own_rewards(config, sample, result)
    if not evaluation:
        _check_policies(config, sample, result)
    if not config.rewards.group_rm:
        with span_of(args, result, "reward_model"):
            await _score(args, result)
    return result


def _adapter(config: GenerationConfig, sample: Sample) -> str | None:
    """The adapter that a sample is of, where there are several."""
    try:
        return adapter_of(config.lora, sample.metadata)
    except ValueError as error:
        raise RolloutError(f"{name_samples(sample)}: {error}") from None


def _adapter_of_all(config: GenerationConfig, group: list[Sample]) -> str | None:
    """The adapter of a group; None where its samples are of several: none is guessed."""
    names = {_adapter(config, sample) for sample in group}
    return names.pop() if len(names) == 1 else None


async def _generate_one(
    config: GenerationConfig, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or config.rollout.custom_generate_function_path
    function: Callable[..., Any] = load_function(path) if path else generate
    group_index = sample.group_index
    with blame(function, sample):
        offered = accepted(function, {"evaluation": evaluation})
        call = lambda params: awaited(function, config.flat, sample, params, **offered)
        log = None if evaluation else answer_log_of(function)
        result = await (log.answer(sample, sampling_params, call) if log else call(sampling_params))
    samples = _as_list(result)
    if not samples or not all(isinstance(item, Sample) for item in samples):
        raise RolloutError(
            f"{describe(function)} returned {result!r:.100} for {name_samples(sample)}, "
            "expected a Sample or a list of Samples"
        )
    check_samples(describe(function), samples)
    for made in samples:
        # Whatever the function has made of it: rewards are compared within the group that was given out.
        made.group_index = made.group_index if group_index is None else group_index
        made.index = sample.index if made.index is None else made.index
    return result


def _check_own_rewards(config: GenerationConfig, sample: Sample, result: Sample | list[Sample]) -> None:
    """Checks rewards that generation gave: only now, since a sample hook may make numbers of anything."""
    origin = " and ".join([_generators(config, [sample]), *config.rollout.rollout_sample_hook_path])
    for made in _as_list(result):
        if made.reward is not None:
            check_reward(config, origin, made, made.reward)


def _check_policies(config: GenerationConfig, sample: Sample, result: Sample | list[Sample]) -> None:
    """Tells of an answer of nobody, where several models are trained, before a whole rollout is made."""
    policies = _known_policies(config) if config.policies.trained_policies else ()
    for made in _as_list(result):
        if policies and made.policy not in policies:
            raise RolloutError(
                f"{_generators(config, [sample])}: {name_samples(made)}: policy is {made.policy!r} (wanted: "
                f"{' or '.join(policies)}, as --policies names them)"
            )


async def _score(args: Any, result: Sample | list[Sample]) -> None:
    samples = _as_list(result)
    if any(sample.status == Sample.Status.ABORTED for sample in samples):
        return
    unscored = [sample for sample in samples if sample.reward is None and not is_ungraded(sample)]
    if isinstance(result, Sample):
        if unscored:
            result.reward = await async_rm(args, result)
        return
    for sample, reward in zip(unscored, await batched_async_rm(args, unscored), strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Generate for all samples of a group at once; with ``--group-rm`` also score them together.

    A sample comes back with a reward, unless its group is given up, or nothing in it could be graded.
    """
    state, config = GenerateState(args), filled(GenerationConfig, args)
    if state.aborted:
        return list(group)
    for sample in group:
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    results = await gather_or_cancel(
        generate_and_rm(args, sample, params_for_sample(config.rollout, sampling_params, sample), evaluation)
        for sample in group
    )
    check_samples(_generators(config, group), [sample for result in results for sample in _as_list(result)])
    if state.aborted or is_given_up(results):
        return results
    samples = [sample for result in results for sample in _as_list(result)]
    if config.rewards.group_rm:
        with span_of(args, samples, "group_reward_model"), asking_adapter(_adapter_of_all(config, group)):
            rewards = await grouped_async_rm(args, results)
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
    fill_ungraded(samples)
    return results


def is_given_up(group: list[Any]) -> bool:
    """Whether a sample of the group is ABORTED and has no reward, split ones included.

    A generate function may give up on a sample. One that gives a reward too has decided what it is worth.
    """
    samples = [sample for result in group for sample in _as_list(result)]
    return any(sample.status is Sample.Status.ABORTED and sample.reward is None for sample in samples)


def _generators(config: GenerationConfig, samples: list[Sample]) -> str:
    """The functions that generate these samples, for messages."""
    default = config.rollout.custom_generate_function_path
    paths = {sample.generate_function_path or default for sample in samples}
    return " and ".join(sorted(path or describe(generate) for path in paths))


def _as_list(result: Any) -> list[Sample]:
    return result if isinstance(result, list) else [result]
