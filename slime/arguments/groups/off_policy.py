"""Corrections for data of another policy than the one that is trained."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from slime.arguments.core.flag import changed, flags_of, given, option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.nucleus import replays_nucleus
from slime.arguments.groups.rollout import is_fully_async, keeps_surplus
from slime.arguments.groups.router import given_router_options
from slime.config.off_policy import CORRECTIONS, OffPolicyConfig
from slime.config.trainers import trainer_of


def derive(args: Namespace) -> None:
    """Bounds with one end given are the same factor in both directions."""
    if args.rs_upper_bound is None:
        args.rs_upper_bound = args.tis_upper_bound
    for kind in ("tis", "rs"):
        if getattr(args, f"{kind}_lower_bound") is None:
            setattr(args, f"{kind}_lower_bound", 1 / getattr(args, f"{kind}_upper_bound"))
    args.tis_function_path = args.custom_tis_function_path or CORRECTIONS[args.tis_type or "tis"]
    args.tis_needs_mean = args.tis_batch_normalize and _corrects_by_mis(args) and args.use_tis
    args.use_routing_replay = args.use_routing_replay or args.use_rollout_routing_replay
    args.use_slime_router = args.use_slime_router or _wants_slime_router(args)
    args.records_routes = args.use_routing_replay and not args.use_rollout_routing_replay


def _corrects_by_mis(args: Namespace) -> bool:
    return args.tis_type == "mis" and args.custom_tis_function_path is None


def notes(args: Namespace) -> Iterator[str]:
    """An old policy that nothing reads, and settings of MIS without it unless a function may read them."""
    if args.keep_old_actor and args.use_rollout_logprobs and not args.get_mismatch_metrics:
        yield "--keep-old-actor: has no effect, with --use-rollout-logprobs the engines' log-probs are read"
    if args.partial_rollout:
        masks = ("mask_offpolicy_in_partial_rollout",)
        yield from staleness_notes(args, "--partial-rollout", masks)
    if is_fully_async(args):
        yield from staleness_notes(args, "fully async rollouts")
    if _wants_slime_router(args):
        name, field = (
            ("--use-rollout-routing-replay", "return_routed_experts")
            if args.use_rollout_routing_replay
            else ("--rollout-top-p, --rollout-top-k", "return_sampling_mask")
        )
        yield f"{name}: taken with --use-slime-router, as sglang-router drops {field} from requests"
    if keeps_surplus(args):
        yield from staleness_notes(args, "--keep-surplus-groups", ())
    if _corrects_by_mis(args) or args.custom_tis_function_path is not None:
        return
    for spec, _ in changed(args, flags_of(OffPolicyConfig)):
        if spec.help.startswith("MIS: "):
            yield f"{spec.names[0]}: has no effect without --tis-type mis"


def staleness_notes(
    args: Namespace, cause: str, others: Sequence[str] = ("keep_old_actor",)
) -> Iterator[str]:
    """A line for a run that trains on tokens of older weights.

    Args:
        cause: why it does.
        others: flags that correct for it, beside those that always do.
    """
    if args.loss_type == "sft_loss":
        return
    ways = ("use_rollout_logprobs", "use_tis", *others)
    taken = dict(given(args, *ways))
    if taken:
        yield f"{cause}: tokens are older than the weights they train, corrected by {' and '.join(taken)}"
    else:
        wanted = ", ".join(map(option_string, ways))
        yield f"{cause}: tokens are older than the weights they train, and nothing corrects for it ({wanted})"


def contradictions(args: Namespace) -> Iterator[str]:
    """Corrections that exclude each other, or that nothing would use."""
    if args.use_rollout_logprobs and args.use_tis:
        yield "--use-rollout-logprobs and --use-tis: only one of them at a time"
    for name, _ in given(args, "custom_tis_function_path", "tis_type"):
        if not (args.use_tis or args.get_mismatch_metrics):
            yield f"{name}: needs --use-tis or --get-mismatch-metrics"
    if args.custom_tis_function_path and args.tis_type:
        yield f"--custom-tis-function-path and --tis-type {args.tis_type}: only one of them"
    if args.keep_old_actor and args.debug_train_only:
        yield "--keep-old-actor: without engines no weights are sent, so that none would become the old ones"
    yield from _empty_ranges(args)
    yield from _bad_replay(args)
    if args.rs_veto_threshold is not None and not args.use_rs:
        yield f"--rs-veto-threshold {args.rs_veto_threshold}: needs --use-rs"
    if args.tis_needs_mean and not args.compute_advantages_and_returns:
        yield "--tis-batch-normalize: without advantages there is no pass that computes the weights"
    no_pass = args.use_rollout_logprobs and not args.get_mismatch_metrics
    if args.loss_type == "policy_loss" and args.use_rollout_entropy and no_pass:
        yield "--use-rollout-entropy: --use-rollout-logprobs leaves out the pass that would compute it"


def _bad_replay(args: Namespace) -> Iterator[str]:
    """Routing replay without routes, or without what could replay or carry them."""
    if not args.use_routing_replay:
        return
    name = "--use-routing-replay" if args.records_routes else "--use-rollout-routing-replay"
    if not args.num_experts:
        yield f"{name}: config.json of --hf-checkpoint describes a model without experts"
    if not (trainer := trainer_of(args)).replays_routes:
        yield f"{name}: not supported with --train-backend {trainer.name} (leave it out)"
    if not args.records_routes:
        yield from _loses_routes(args)
    elif not args.compute_advantages_and_returns:
        yield f"{name}: without advantages there is no pass that records routes"
    elif args.use_rollout_logprobs and not args.get_mismatch_metrics:
        yield f"{name}: --use-rollout-logprobs leaves out the pass that would record routes"


def _loses_routes(args: Namespace) -> Iterator[str]:
    """What stands between the engine's routes and the trainer."""
    if args.loss_type == "sft_loss":
        yield "--use-rollout-routing-replay: no engine makes the tokens of --loss-type sft_loss"
    elif not (args.use_slime_router or args.debug_train_only):
        yield (
            "--use-rollout-routing-replay: sglang-router drops return_routed_experts from requests "
            "(wanted: --use-slime-router)"
        )


def _wants_slime_router(args: Namespace) -> bool:
    """Whether the router may be chosen here: nothing was said that only sglang-router does."""
    replays = args.use_rollout_routing_replay or replays_nucleus(args)
    replays = replays and not (args.debug_train_only or args.loss_type == "sft_loss")
    own = args.sglang_router_ip or args.prefill_num_servers or args.sglang_config
    return replays and not (args.use_slime_router or own or any(given_router_options(args)))


def _empty_ranges(args: Namespace) -> Iterator[str]:
    bounds = (("tis_clip_low", "tis_clip"), ("tis_lower_bound", "tis_upper_bound"))
    for low, high in (*bounds, ("rs_lower_bound", "rs_upper_bound")):
        least, most = getattr(args, low), getattr(args, high)
        if least > most:
            yield f"{option_string(low)} {least}: above {option_string(high)} {most}"


CONFIG_GROUP = ConfigGroup(
    {"off-policy corrections": OffPolicyConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
