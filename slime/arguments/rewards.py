"""Where rewards come from."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.concern import Concern
from slime.arguments.flags import flag, path_flag
from slime.arguments.rollout import generates_by_default

# Names that slime.rollout.rm_hub scores by; any of them may follow "boxed_".
RM_TYPES = ("math", "deepscaler", "dapo", "f1", "gpqa", "random", "remote_rm")


@dataclass(frozen=True)
class RewardArgs:
    """Where rewards come from."""

    rm_type: str | None = flag(help="built-in reward: math, f1, ...; a boxed_ prefix grades the boxed answer")
    reward_key: str | None = flag(help="key of the reward to train on, when rewards are mappings")
    eval_reward_key: str | None = flag(help="the same for evaluation; default --reward-key")
    group_rm: bool = flag(False, help="score a whole group in one call")
    rm_url: str | None = flag(help="address of the remote reward model (rm_type remote_rm)")
    custom_rm_path: str | None = path_flag("async fn(args, sample) that returns the reward")
    custom_reward_post_process_path: str | None = path_flag("fn(args, samples) -> (raw, rewards)")


def derive(args: Namespace) -> None:
    """Evaluations are scored as training is."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key


def contradictions(args: Namespace) -> Iterator[str]:
    """Samples that nothing would score."""
    if generates_by_default(args) and not scores_samples(args) and args.num_rollout != 0:
        yield "--rm-type: missing (wanted: a reward type, or --custom-rm-path)"
    yield from bad_reward_type("--rm-type", args.rm_type, args.rm_url)


def scores_samples(args: Namespace) -> bool:
    """Whether flags give every sample a reward."""
    return bool(args.custom_rm_path or args.rm_type or args.custom_generate_function_path)


def bad_reward_type(where: str, rm_type: str | None, rm_url: str | None) -> Iterator[str]:
    """A type that there is not, or that needs an address."""
    kind = (rm_type or "").strip().removeprefix("boxed_")
    if kind and kind not in RM_TYPES:
        yield f"{where} {rm_type}: unknown (wanted: {', '.join(RM_TYPES)}, or boxed_ before one)"
    if kind == "remote_rm" and rm_url is None:
        yield f"{where} {rm_type}: needs --rm-url"


CONCERN = Concern({"rewards": RewardArgs}, derive=derive, contradictions=contradictions)
