"""Several low-rank adapters on one base: how they are named, and what is not done with them."""

import re
from argparse import Namespace
from collections.abc import Iterator

from slime.adapters.named import unnamed
from slime.arguments.core.flag import option_string
from slime.config.lora import LoraConfig
from slime.config.run import filled

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_TREE = "RadixTreeMiddleware"
_NOT_PER_ADAPTER = {
    "normalize_advantages": (False, "advantages are whitened over the samples of all adapters"),
    "lora_save_merged": (False, "a merged model has one of them"),
    "keep_old_actor": (False, "older weights are kept of one model"),
    "ref_update_interval": (None, "the reference of all is the base"),
    "overlap_param_gather": (False, "an update is gathered when another adapter is in place"),
    "optimizer_cpu_offload": (False, "moments on the host are those of one adapter"),
    "use_routing_replay": (False, "routes are recorded for one model"),
    "use_rollout_routing_replay": (False, "routes are recorded for one model"),
}
"""Flags, the value that asks for nothing, and why no other one goes with several adapters."""


def contradictions_of_several(args: Namespace) -> Iterator[str]:
    """What cannot be with ``--lora-adapters``, or is no name."""
    name = f"--lora-adapters {' '.join(args.lora_adapters)}"
    wrong = [given for given in args.lora_adapters if not _NAME.fullmatch(given)]
    if wrong:
        wanted = "up to 100 letters, digits, and _ . - behind the first"
        yield f"{name}: {wrong[0]!r} is no name (wanted: {wanted})"
    if len({*args.lora_adapters}) < len(args.lora_adapters):
        yield f"{name}: names an adapter twice"
    if args.lora_merge:
        yield f"{name}: needs --no-lora-merge, as merged weights have one adapter"
    if args.use_critic:
        yield f"--advantage-estimator {args.advantage_estimator}: not with {name}, which have one critic"
    for flag, (idle, why) in _NOT_PER_ADAPTER.items():
        if (found := getattr(args, flag, idle)) != idle:
            yield f"{option_string(flag)} {found}: not with {name} ({why})"
    for path in args.slime_router_middleware_paths:
        if path.rpartition(".")[2] == _TREE:
            why = "it knows tokens and log-probs by their text, whichever adapter they are of"
            yield f"--slime-router-middleware-paths {path}: not with {name} ({why})"
    for dataset in args.eval_datasets:
        overrides = dataset.metadata_overrides
        if args.lora_adapter_key in overrides and (reason := unnamed(filled(LoraConfig, args), overrides)):
            yield f"eval dataset {dataset.name}: metadata_overrides: {reason}"
    if not args.debug_rollout_only:
        yield from _uneven(args, name)


def _uneven(args: Namespace, name: str) -> Iterator[str]:
    """Steps in which an adapter may have samples that do not spread over the ranks.

    A step has whole groups of an adapter, of which nobody knows how many: each must do by itself.
    """
    group, step = args.n_samples_per_prompt, args.global_batch_size
    if step % group:
        yield f"--global-batch-size {step}: not with {name} (wanted: whole groups of {group})"
    stages = args.pipeline_model_parallel_size
    sizes = args.tensor_model_parallel_size * stages * args.context_parallel_size
    ranks = max(1, args.trainer_world_size // sizes)
    least = ranks * (stages if args.virtual_pipeline_model_parallel_size else 1)
    if args.use_dynamic_batch_size:
        wanted = "" if group >= least else f"at least {least}, one for each micro-batch of all ranks"
    else:
        least *= args.micro_batch_size
        wanted = f"a multiple of {least}, a micro-batch for each rank" if group % least else ""
    if wanted:
        yield f"--n-samples-per-prompt {group}: not with {name} (wanted: {wanted})"
