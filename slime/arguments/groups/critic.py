"""The critic: whether there is one, where it trains, and what of the flags its processes see otherwise."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slime.arguments.core.flag import flags_of, option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.run_args import copied
from slime.arguments.validate.checkpoint_files import (
    bad_checkpoint,
    has_checkpoint,
    marked_iteration,
    newest_of_all,
    newest_whole,
    unusable_weights,
)
from slime.arguments.validate.outputs import bad_output
from slime.config.advantages import ESTIMATORS
from slime.config.critic import CriticConfig

V = TypeVar("V")
OWN_FLAGS = {
    **dict(lr="critic_lr", lr_warmup_iters="critic_lr_warmup_iters"),
    **dict(load="critic_load", save="critic_save"),
}
"""Flags of the actor that the critic has under names of its own."""
SHARED = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "allgather_cp"),
        *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        *("train_backend", "hf_checkpoint", "bf16", "fp16", "fp32", "advantage_estimator", "num_rollout"),
        *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"),
        *("micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu"),
    }
)
"""Flags in which actor and critic are the same: they train on the same batches, rank by rank."""
_ALWAYS = ("kl_coef", "use_opd", "custom_advantage_function_path", "untie_embeddings_and_output_weights")
_ESTIMATOR = "--advantage-estimator ppo"


def notes(args: Namespace) -> Iterator[str]:
    """What only a critic heeds, and what it does not."""
    if not ESTIMATORS[args.advantage_estimator].critic:
        defaults = {spec.dest: spec.default for spec in flags_of(CriticConfig)}
        for name, default in {"lambd": 1.0, "value_clip": 0.2, **defaults}.items():
            value = getattr(args, name)
            if value != default:
                shown = "" if isinstance(value, bool) else f" {value}"
                yield f"{option_string(name)}{shown}: has no effect without {_ESTIMATOR}"
        return
    if args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        steps = args.num_critic_only_steps
        yield f"--num-critic-only-steps {steps}: the actor trains in none of {args.num_rollout} rollouts"
    if args.kl_coef and args.lambd < 1:
        yield (
            f"--kl-coef {args.kl_coef} with --lambd {args.lambd}: the critic knows the rewards without their "
            "KL, so advantages heed that of later tokens less than --gamma says (to avoid: --lambd 1)"
        )
    if args.offload_train is False and not _has_own_gpus(args):
        yield "--no-offload-train: has no effect, actor and critic take turns on the same GPUs"
    yield from _damaged(args)


def _damaged(args: Namespace) -> Iterator[str]:
    """Iterations of this run's critic that are not gone on from."""
    own = _own_places(args)
    place = args.critic_load or _found_in(own)
    if args.ckpt_step is not None or place not in own:
        return
    step = newest_of_all((args.load, place), args.verify_checkpoint)
    for reason in newest_whole(place, args.verify_checkpoint)[1] if step is not None else ():
        yield f"--critic-load {place}: {reason}: iteration {step} is loaded"


def derive(args: Namespace) -> None:
    """Places and numbers that follow those of the actor."""
    estimates = ESTIMATORS[args.advantage_estimator].critic
    args.use_critic = estimates and not args.debug_rollout_only and args.num_rollout != 0
    args.critic_num_gpus, args.critic_resumes = 0, False
    if not args.use_critic:
        return
    if _has_own_gpus(args):
        nodes = args.critic_num_nodes or args.actor_num_nodes
        args.critic_num_gpus = nodes * (args.critic_num_gpus_per_node or args.actor_num_gpus_per_node)
    else:
        args.offload_train = True
    if args.critic_lr is None:
        args.critic_lr = args.lr
    if args.critic_save is None and args.save is not None:
        args.critic_save = str(Path(args.save) / "critic")
    _derive_load(args)


def _has_own_gpus(args: Namespace) -> bool:
    return args.critic_num_nodes is not None or args.critic_num_gpus_per_node is not None


def _derive_load(args: Namespace) -> None:
    """Derives what the critic starts from.

    A checkpoint of this run is gone on from if the actor goes on too, and then at the same iteration: a run
    that was killed between their saves goes on at the earlier one. Of any other only the weights are taken.
    """
    own = _own_places(args)
    if args.critic_load is None:
        args.critic_load = _found_in(own)
    places = args.load, args.critic_load
    marked = [marked_iteration(place) for place in places]
    args.critic_resumes = args.critic_load in own and None not in marked
    if args.critic_resumes and args.ckpt_step in (None, _gone_back_to(args)):
        step = newest_of_all(places, args.verify_checkpoint)
        if step is not None:  # else what is damaged is refused
            args.ckpt_step = None if marked == [step, step] else step
    if args.critic_load in own and not args.critic_resumes:
        # It was saved before the actor's first checkpoint.
        args.critic_load = None
    if args.critic_load is None and marked[0] is not None:
        args.critic_load = args.load


def _own_places(args: Namespace) -> set[str]:
    """Where a checkpoint of this run's critic may be, the same before and after ``derive``."""
    saved = args.critic_save or (args.save and str(Path(args.save) / "critic"))
    loaded = args.load and str(Path(args.load) / "critic")
    return {place for place in (saved, loaded) if place}


def _found_in(places: Iterable[str]) -> str | None:
    return next((place for place in sorted(places) if has_checkpoint(place)), None)


def _gone_back_to(args: Namespace) -> int | None:
    """The iteration that the actor would go on from because a newer one is damaged."""
    step, skipped = newest_whole(args.load, args.verify_checkpoint)
    return step if skipped else None


def of_critic(args: V) -> V:
    """The flags as the critic's processes see them: a copy.

    Its returns are those of the rewards alone, as it has no log-probs, and hooks of the actor's batch are
    not called with the critic's.
    """
    given = vars(args)
    changes = {
        **dict(load=given["critic_load"], save=given["critic_save"], save_hf=None),
        **dict(lr=given["critic_lr"], lr_warmup_iters=given["critic_lr_warmup_iters"]),
        **dict(lr_warmup_fraction=None, untie_embeddings_and_output_weights=True),
        **dict(kl_coef=0.0, use_kl_loss=False, normalize_advantages=False),
        **dict(use_opd=False, use_tis=False, tis_needs_mean=False, keep_old_actor=False),
        **dict(custom_advantage_function_path=None, rollout_data_postprocess_path=None),
        **dict(save_debug_train_data=None, save_debug_log_probs=False, num_critic_only_steps=0),
    }
    if not given["critic_resumes"]:
        changes |= dict(finetune=True, no_load_optim=True, no_load_rng=True, ckpt_step=_step(given))
    own = given.get("critic_overrides") or {}
    return copied(args, **changes | {key: value for key, value in own.items() if key not in _ALWAYS})


def _step(given: Mapping[str, Any]) -> int | None:
    """The iteration that the critic loads: the actor's, if it is of the same run; None for the latest."""
    is_own = given["critic_resumes"] or given["critic_load"] == given["load"]
    return given["ckpt_step"] if is_own else None


def contradictions(args: Namespace) -> Iterator[str]:
    """A critic that cannot learn, or whose ranks have no counterpart among the actor's."""
    if not args.use_critic:
        return
    if not args.compute_advantages_and_returns:
        yield f"{_ESTIMATOR}: the critic needs returns (wanted: no --disable-compute-advantages-and-returns)"
    if args.loss_type == "sft_loss":
        yield f"{_ESTIMATOR}: --loss-type sft_loss has no use for a critic (wanted: without)"
    if args.critic_num_gpus not in (0, args.trainer_world_size):
        yield (
            f"--critic-num-nodes, --critic-num-gpus-per-node: {args.critic_num_gpus} GPUs (wanted: "
            f"{args.trainer_world_size}, as the actor has: each rank gives its values to one of the actor's)"
        )
    steps = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.lr_decay_iters or steps // args.global_batch_size
    if steps and args.critic_lr_warmup_iters >= steps:
        warmup = args.critic_lr_warmup_iters
        yield f"--critic-lr-warmup-iters {warmup}: wanted less than the {steps} steps of the decay"
    if args.min_lr > args.critic_lr:
        yield f"--min-lr {args.min_lr}: above --critic-lr {args.critic_lr}"
    if args.num_critic_only_steps and args.critic_train_only:
        yield "--num-critic-only-steps and --critic-train-only: only one of them at a time"
    if args.save_interval is not None and args.save is None and args.critic_save is not None:
        yield f"--critic-save {args.critic_save}: needs --save, to go on from both"


def missing(args: Namespace) -> Iterator[str]:
    """The critic's checkpoint, and a place for new ones."""
    if not args.use_critic:
        return
    yield from bad_checkpoint(args, "critic_load", _step(vars(args)))
    yield from bad_output(args, "critic_save", is_directory=True)
    if args.critic_save is not None:
        for name in ("save", "load", "ref_load", "hf_checkpoint"):
            other = getattr(args, name)
            if other is not None and Path(other).resolve() == Path(args.critic_save).resolve():
                yield f"--critic-save {args.critic_save}: is {option_string(name)} (wanted: another place)"


def unusable(args: Namespace) -> Iterator[str]:
    """Weights of the critic that cannot be read."""
    if args.use_critic:
        yield from unusable_weights(args, "critic_load")


CONFIG_GROUP = ConfigGroup(
    {"critic": CriticConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
