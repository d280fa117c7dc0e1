"""How samples are generated."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import option_string
from slime.arguments.core.group import ConfigGroup
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION, RolloutConfig
from slime.models.hf_config import HfConfig, HfConfigError

SFT_ROLLOUT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
STREAMING_FUNCTION = "slime.rollout.sglang_streaming_rollout.generate_streaming"
REPLAY_FUNCTION = "slime.rollout.forge_load.generate_rollout"
REJECTION_SAMPLING = "slime.rollout.rejection_sampling"
REJECTION_SAMPLING_FUNCTION = f"{REJECTION_SAMPLING}.generate_rollout"
_ANSWERING = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_FUNCTION, REJECTION_SAMPLING_FUNCTION)
"""Rollout functions of ours that have engines answer prompts, and that evaluate."""


def derive(args: Namespace) -> None:
    """Lengths that a limit on the context implies."""
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    limit = args.rollout_max_context_len
    if limit is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = limit - 1
    if args.rollout_max_response_len is None:
        args.rollout_max_response_len = limit


def contradictions(args: Namespace) -> Iterator[str]:
    """Lengths without a limit or beyond one, and rollout functions that lack what they need."""
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size}: "
            f"below --rollout-batch-size {args.rollout_batch_size}"
        )
    if args.rollout_max_response_len is None and not args.debug_train_only:
        yield "--rollout-max-response-len: missing (wanted: the longest response in tokens)"
    yield from bad_stop("--rollout-stop", args.rollout_stop)
    limit = args.rollout_max_context_len
    if limit is not None and args.rollout_max_prompt_len > limit - 1:
        longest = args.rollout_max_prompt_len
        yield f"--rollout-max-prompt-len {longest}: above --rollout-max-context-len {limit} - 1"
    known = args.max_position_embeddings
    if limit is not None and limit > known:
        yield f"--rollout-max-context-len {limit}: above max_position_embeddings {known} (config.json)"
    if generates_by_default(args) and not args.rollout_global_dataset and args.num_rollout != 0:
        yield "--disable-rollout-global-dataset: needs a --rollout-function-path of your own"
    if args.rollout_function_path == SFT_ROLLOUT_FUNCTION and args.n_samples_per_prompt != 1:
        yield f"--n-samples-per-prompt {args.n_samples_per_prompt}: SFT takes each row once (wanted: 1)"

    yield from _fully_async(args)
    streams = args.custom_generate_function_path == STREAMING_FUNCTION
    if streams and getattr(args, "sglang_incremental_streaming_output", False):
        yield f"--sglang-incremental-streaming-output: {STREAMING_FUNCTION} reads cumulative chunks"


def longest_context(args: Namespace) -> int:
    """Tokens of a prompt and its response that the engines can hold at most."""
    known = int(args.max_position_embeddings)
    return max(known, int(getattr(args, "sglang_context_length", None) or known))


def beyond_context(args: Namespace, name: str) -> Iterator[str]:
    """What becomes of responses whose limit, a flag, no context holds: they end, as the original's do."""
    longest, context = getattr(args, name), _context_of_config(args)
    if longest is not None and context is not None and longest > context:
        yield (
            f"{option_string(name)} {longest}: above the longest context, {context} (config.json), at which "
            "responses end"
        )


def _context_of_config(args: Namespace) -> int | None:
    """`longest_context` before the shape of the model is known; None where nothing says it."""
    with contextlib.suppress(HfConfigError):
        stated = HfConfig.read(args.hf_checkpoint).text.get("max_position_embeddings")
        limits = [stated, getattr(args, "sglang_context_length", None), args.max_position_embeddings]
        return max((limit for limit in limits if isinstance(limit, int)), default=None)
    return None


def bad_stop(where: str, strings: list[str] | None) -> Iterator[str]:
    """A string that every text holds, on which SGLang ends each answer and the embedded engine none."""
    if strings and "" in strings:
        yield f"{where} '': ends every answer at its first token (wanted: a string, or none)"


def _fully_async(args: Namespace) -> Iterator[str]:
    if not is_fully_async(args):
        if args.max_staleness is not None:
            needed = f"--rollout-function-path {FULLY_ASYNC_FUNCTION}"
            yield f"--max-staleness {args.max_staleness}: needs {needed}"
    elif args.colocate:
        yield (
            "--colocate: fully async engines generate while the trainer trains, on GPUs of their own "
            "(wanted: without --colocate, and --rollout-num-gpus)"
        )


def notes(args: Namespace) -> Iterator[str]:
    """A size of fetches that nobody makes, and a length that no response can have."""
    if generates_by_default(args):
        yield from beyond_context(args, "rollout_max_response_len")
    if is_fully_async(args) and args.over_sampling_batch_size is not None:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size}: has no effect, "
            "fully async rollouts fetch a group whenever one is finished"
        )


def keeps_surplus(args: Namespace) -> bool:
    """Whether a rollout may finish more groups than it trains on, and is to leave them to the next one."""
    fetched = args.over_sampling_batch_size or args.rollout_batch_size
    more = fetched > args.rollout_batch_size or args.dynamic_sampling_filter_path
    masked = args.partial_rollout and args.mask_offpolicy_in_partial_rollout
    return generates_by_default(args) and bool(more) and not masked and args.keep_surplus_groups


def replays(args: Namespace) -> bool:
    """Whether samples are those of ``--load-forge-rollout-data``."""
    return args.rollout_function_path == REPLAY_FUNCTION


def is_fully_async(args: Namespace) -> bool:
    return args.rollout_function_path == FULLY_ASYNC_FUNCTION


def generates_by_default(args: Namespace) -> bool:
    """Whether engines answer prompts by a built-in rollout function."""
    return answers(args.rollout_function_path) and not args.debug_train_only


def answers(function_path: str) -> bool:
    """Whether a rollout function is one of ours by which engines answer prompts."""
    return function_path in _ANSWERING


CONFIG_GROUP = ConfigGroup(
    {"rollout": RolloutConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
