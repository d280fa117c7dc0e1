"""The sources of rewards."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rollout import generates_by_default
from slime.config.rewards import RewardConfig
from slime.utils.addresses import is_web_address
from slime.utils.allowed_hosts import HostRefused, bad_entries, require_listed

_SCORERS = "slime.rollout.rm_hub."
RM_TYPES = {
    "math": f"{_SCORERS}math_grader.score_math",
    "deepscaler": f"{_SCORERS}deepscaler.score",
    "math_compat": f"{_SCORERS}math_grader.score_math_compat",
    "deepscaler_compat": f"{_SCORERS}deepscaler.score_compat",
    "dapo": f"{_SCORERS}math_dapo_utils.score",
    "f1": f"{_SCORERS}f1.score",
    "gpqa": f"{_SCORERS}gpqa.score",
    "ifbench": f"{_SCORERS}ifbench.score",
    "random": f"{_SCORERS}score_at_random",
    "remote_rm": f"{_SCORERS}remote.score",
}
"""What ``--rm-type`` names: async fn(args, sample, response) -> reward. "boxed_" may come before a name."""


def derive(args: Namespace) -> None:
    """Evaluations are scored as training is."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key


def contradictions(args: Namespace) -> Iterator[str]:
    """Samples that nothing would score."""
    if generates_by_default(args) and not scores_samples(args) and args.num_rollout != 0:
        yield "--rm-type: missing (wanted: a reward type, or --custom-rm-path)"
    yield from bad_reward_type("--rm-type", args.rm_type, args.rm_url)
    yield from _bad_overlong_buffer(args)
    if args.rm_url is not None and not is_web_address(args.rm_url):
        yield f"--rm-url {args.rm_url}: wanted an address, http://host:port/path or https://..."
    elif args.allowed_hosts is not None:
        yield from _bad_hosts(args.allowed_hosts, args.rm_url)
    if gives_a_mapping(args.rm_type) and not (args.reward_key or _makes_numbers(args)):
        yield "--rm-type dapo: gives a mapping of score, acc and pred (wanted: --reward-key score)"


def _bad_hosts(entries: Sequence[str], rm_url: str | None) -> Iterator[str]:
    bad = list(bad_entries(entries))
    yield from bad
    if not bad and rm_url is not None:
        try:
            require_listed(rm_url, entries, "--rm-url")
        except HostRefused as error:
            yield str(error)


def _bad_overlong_buffer(args: Namespace) -> Iterator[str]:
    buffer, limit = args.overlong_buffer_len, args.rollout_max_response_len
    if buffer is not None and limit is None:
        yield f"--overlong-buffer-len {buffer}: needs --rollout-max-response-len"
    elif buffer is not None and buffer > limit:
        yield f"--overlong-buffer-len {buffer}: above --rollout-max-response-len {limit}"


def notes(args: Namespace) -> Iterator[str]:
    """A punishment that nothing asks for, or where the user's functions make the rewards."""
    if args.overlong_buffer_len is None and args.overlong_penalty_factor != 1:
        yield f"--overlong-penalty-factor {args.overlong_penalty_factor}: needs --overlong-buffer-len"
    if args.overlong_buffer_len is not None and _makes_numbers(args):
        yield "--overlong-buffer-len: has no effect, rewards are processed by a function of your own"


def _makes_numbers(args: Namespace) -> bool:
    return bool(args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path)


def scores_by_type(args: Namespace) -> bool:
    """Whether samples of the engines are scored by ``--rm-type``, or by ``rm_type`` in their metadata."""
    return generates_by_default(args) and not (args.custom_rm_path or args.custom_generate_function_path)


def scores_samples(args: Namespace) -> bool:
    """Whether flags give every sample a reward."""
    return bool(args.custom_rm_path or args.rm_type or args.custom_generate_function_path)


def compares_with_label(rm_type: Any) -> bool:
    """Whether a sample without a label cannot be scored by this type."""
    return _kind(rm_type) in ("math", "deepscaler", "math_compat", "deepscaler_compat", "dapo", "f1")


def gives_a_mapping(rm_type: Any) -> bool:
    """Whether rewards of this type are mappings, of which ``--reward-key`` names the number."""
    return _kind(rm_type) == "dapo"


def needs_no_grade(args: Any, rm_type: Any) -> bool:
    """Whether an answer without a label earns 0, as a teacher's log-probs teach and not the reward."""
    return (
        bool(getattr(args, "use_opd", False))
        and compares_with_label(rm_type)
        and not gives_a_mapping(rm_type)
    )


def follows_instructions(args: Namespace, rm_type: Any) -> bool:
    """Whether this type needs the instructions in a record's metadata, which no hook could put there."""
    return _kind(rm_type) == "ifbench" and not args.rollout_sample_hook_path


def bad_reward_type(where: str, rm_type: Any, rm_url: str | None) -> Iterator[str]:
    """A type that there is not, or that needs an address."""
    kind = _kind(rm_type)
    if kind and kind not in RM_TYPES:
        yield f"{where} {rm_type}: unknown (wanted: {', '.join(RM_TYPES)}, or boxed_ before one)"
    if kind == "remote_rm" and rm_url is None:
        yield f"{where} {rm_type}: needs --rm-url"


def _kind(rm_type: Any) -> str:
    return str(rm_type or "").strip().removeprefix("boxed_")


CONFIG_GROUP = ConfigGroup(
    {"rewards": RewardConfig}, derive=derive, notes=notes, contradictions=contradictions
)
