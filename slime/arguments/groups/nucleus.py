"""Sampling that leaves tokens out, in training: the engine tells which, and the trainer replays it."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rejection import samples_by_rejection
from slime.config.nucleus import NucleusConfig

_LARGEST_MASK = 4096
"""Token ids of a position that SGLang tells of unless asked for more."""


def derive(args: Namespace) -> None:
    """Sets how many ids engines may tell of: the whole vocabulary, or some more than k, for ties."""
    args.replays_nucleus = replays_nucleus(args)
    top_k = args.rollout_top_k
    most = args.vocab_size or _LARGEST_MASK
    needed = most if top_k == -1 else min(most, 2 * top_k)
    args.nucleus_size = _given_size(args) or max(needed, _LARGEST_MASK)
    args.nucleus_top_k = min(most, args.nucleus_size) if args.replays_nucleus and top_k == -1 else top_k


def replays_nucleus(args: Namespace) -> bool:
    """Whether tokens are left out of what a policy is trained on."""
    cuts = args.rollout_top_p != 1 or args.rollout_top_k != -1
    return cuts and args.loss_type != "sft_loss" and not samples_by_rejection(args)


def _given_size(args: Namespace) -> int | None:
    """What the user has set, if anything."""
    given: int | None = getattr(args, "sglang_sampling_mask_max_tokens", None)
    return None if given == _LARGEST_MASK else given


def notes(args: Namespace) -> Iterator[str]:
    """What a nucleus costs, and where it makes training idle."""
    if not replays_nucleus(args):
        return
    if args.rollout_top_k == 1:
        yield "--rollout-top-k 1: each token is the only one of its nucleus, so that all gradients are 0"
    if args.rollout_top_k == -1 and _given_size(args) is None and args.rollout_engine == "sglang":
        yield (
            f"{_named(args)}: SGLang copies as many ids per sampled token as the vocabulary has tokens; "
            "--rollout-top-k 1000, or --sglang-sampling-mask-max-tokens, bounds that and leaves out more"
        )
    if args.use_opd and args.opd_type == "sglang":
        yield (
            f"--opd-type sglang: the teacher's log-probs are over the whole vocabulary, the policy's by "
            f"{_named(args)} are not"
        )


def contradictions(args: Namespace) -> Iterator[str]:
    """Engines and routers that do not tell of nuclei."""
    if not args.replays_nucleus or args.debug_train_only:
        return
    name = _named(args)
    if not args.use_slime_router:
        yield (
            f"{name}: sglang-router drops return_sampling_mask and custom_params from requests (wanted: "
            "--use-slime-router)"
        )
    if args.nucleus_size < args.rollout_top_k:
        yield f"{name}: above --sglang-sampling-mask-max-tokens {args.nucleus_size} (wanted: at most as many)"
    if args.rollout_engine == "sglang":
        yield from _silent_sglang(args, name)


def _silent_sglang(args: Namespace, name: str) -> Iterator[str]:
    if not hasattr(args, "sglang_sampling_mask_max_tokens"):
        yield (
            f"{name}: the SGLang that is installed does not tell of nuclei (wanted: sglang 0.5.23, which has "
            "return_sampling_mask)"
        )
    for option, fine in (("speculative_algorithm", (None, "DFLASH")), ("sampling_backend", _BACKENDS)):
        value = getattr(args, f"sglang_{option}", None)
        if value not in fine:
            yield f"{name}: {option_string(f'sglang_{option}')} {value}: SGLang tells of no nuclei with it"


_BACKENDS = (None, "flashinfer", "pytorch", "intel_xpu")


def _named(args: Namespace) -> str:
    if args.rollout_top_k != -1:
        return f"--rollout-top-k {args.rollout_top_k}"
    return f"--rollout-top-p {args.rollout_top_p}"


CONFIG_GROUP = ConfigGroup(
    {"nucleus sampling": NucleusConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
