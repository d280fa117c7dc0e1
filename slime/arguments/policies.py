"""The ``args`` of each policy of a run that trains several.

The first one's are the run's. Every other one's are those of a command line of its own: the run's, with what
the file of ``--policies`` says of it in place of the same flags, and with checkpoints beside the first one's.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import given
from slime.arguments.core.run_args import copied
from slime.arguments.validate.checkpoint_files import marked_iteration, newest_of_all
from slime.config.advantages import ESTIMATORS
from slime.config.lora import LoraConfig
from slime.config.run import filled
from slime.utils.checkpoint_record import iterations

Policies = Mapping[str, Namespace]
_BESIDE = ("save", "load", "save_hf")
_PLACES = ("save", "save_hf", "save_debug_train_data", "update_weight_disk_dir")
_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")


def further_policies(args: Namespace, command_line: Mapping[str, Any], notes: list[str]) -> Policies:
    """The flags of all policies but the first, before anything is derived; none where there is one model.

    All go on from the same iteration, the latest that is whole of each: a run may have been killed between
    their saves.

    Args:
        args: of the first policy.
        command_line: what `take_first_policy` returned.
        notes: what a user should be told of that is added.
    """
    others = [*args.trained_policies.items()][1:]
    found = {name: _of_policy(args, command_line, name, own) for name, own in others}
    if found:
        notes += _start_together([args, *found.values()])
    return found


def _of_policy(
    args: Namespace, command_line: Mapping[str, Any], name: str, own: Mapping[str, Any]
) -> Namespace:
    values = {key: copy(v) if isinstance(v, list | dict) else v for key, v in command_line.items()}
    places = ((place, getattr(args, place)) for place in _BESIDE)
    beside = {place: str(Path(path) / "policies" / name) for place, path in places if path is not None}
    return copied(
        args, **{**values, **beside, **own, "trained_policies": {}, "policies": None, "policy_name": name}
    )


def _start_together(policies: list[Namespace]) -> Iterator[str]:
    """Sets where all start, and yields what that leaves out."""
    first, places = policies[0], [args.load for args in policies]
    marked = [None if args.finetune else marked_iteration(args.load) for args in policies]
    if first.ckpt_step is not None or set(marked) == {None}:
        return
    if None in marked:
        if _ended_at_first_save(policies):
            yield f"--load {first.load}: not every policy has a checkpoint there, all begin anew"
            for args in policies:
                args.load = None
        return
    step = newest_of_all(places, first.verify_checkpoint)
    if step is not None and set(marked) != {step}:  # what is damaged beyond that is refused
        yield f"--load {first.load}: iteration {step} is the latest that is whole of every policy"
        for args in policies:
            args.ckpt_step = step


def _ended_at_first_save(policies: list[Namespace]) -> bool:
    """Whether the run can only have been killed before all had saved once, so that nothing else is lost."""
    own = all(args.load == args.save and not args.finetune for args in policies)
    return own and all(len(iterations(Path(args.load))) < 2 for args in policies)


def join_policies(args: Namespace, others: Policies) -> None:
    """Makes ``args`` those of the whole run, after all that follows from flags is known of each policy.

    Raises:
        UsageError: the policies do not go together.
    """
    if not others:
        return
    own = copied(args, trained_policies={}, policies=None)
    policies = {args.policy_name: own, **others}
    if wrong := [f"--policies {args.policies}: {reason}" for reason in _bad_together(policies)]:
        raise UsageError(*wrong)
    args.trained_policies = policies
    args.served_models = [model for policy in policies.values() for model in policy.served_models]


def _bad_together(policies: Policies) -> Iterator[str]:
    """Places that two of them write to, weights that start apart, and what one policy alone can do."""
    for name, args in policies.items():
        if ESTIMATORS[args.advantage_estimator].critic:
            estimator = f"--advantage-estimator {args.advantage_estimator}"
            yield f"{name}: {estimator} needs a critic (wanted: one without)"
        if filled(LoraConfig, args).serves_adapter:
            yield f"{name}: --no-lora-merge: engines of several policies get whole weights (wanted: without)"
    yield from _names_twice(policies)
    first, *further = policies.items()
    taken = dict.fromkeys(given(first[1], *_PLACES), first[0])
    for name, args in further:
        for option, path in given(args, *_PLACES):
            other = taken.setdefault((option, path), name)
            if other != name:
                yield f"{name}: {option} {path}: {other} writes there (wanted: another place)"
        if _vocabulary(args) != _vocabulary(first[1]):
            yield (
                f"{name}: the tokenizer of {args.hf_checkpoint} is not that of {first[1].hf_checkpoint} "
                f"(wanted: models of one vocabulary)"
            )
        if _starts_at(args) != _starts_at(first[1]):
            yield (
                f"{name}: --load {args.load}: iteration {_starts_at(args)}, but {first[0]} goes on from "
                f"{_starts_at(first[1])} (wanted: the same of both, or finetune: true of both)"
            )


def _names_twice(policies: Policies) -> Iterator[str]:
    """A name says whose an answer is, and which router is asked."""
    whose: dict[str, str] = {}
    for name, args in policies.items():
        for model in args.served_models:
            other = whose.setdefault(model.name, name)
            if other != name:
                where = f"{name}: sglang_config {args.sglang_config}"
                yield f"{where}: model {model.name}: {other} has a model of that name (wanted: another name)"


def _vocabulary(args: Namespace) -> list[Any]:
    files = [Path(args.hf_checkpoint) / name for name in _VOCABULARY]
    return [args.vocab_size, *(file.read_bytes() if file.is_file() else None for file in files)]


def _starts_at(args: Namespace) -> int | None:
    """The iteration that a policy goes on from; None if it starts anew."""
    if args.finetune or args.start_rollout_id == 0:
        return None
    return args.ckpt_step if args.ckpt_step is not None else marked_iteration(args.load)
