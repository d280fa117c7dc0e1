"""Every concern, and what is asked of each of them in turn."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from slime.arguments import (
    advantages,
    batches,
    check,
    checkpoints,
    cluster,
    compute,
    critic,
    custom_config,
    data,
    debug,
    distillation,
    engines,
    evaluation,
    fsdp,
    hf_checkpoint,
    hooks,
    kl,
    loss,
    model_shape,
    moe,
    mtp,
    nucleus,
    off_policy,
    optimizer,
    optimizer_state,
    overwrites,
    parallelism,
    precision,
    rejection,
    rewards,
    rollout,
    router,
    slime_router,
    tracking,
    trainer,
    weight_sync,
)
from slime.arguments.concern import Concern
from slime.arguments.facts import Facts
from slime.arguments.flags import Flag, flags_of
from slime.arguments.megatron import megatron_flags
from slime.arguments.user_code import unusable_code

CONCERNS: tuple[Concern, ...] = (
    cluster.CONCERN,
    engines.CONCERN,
    router.CONCERN,
    slime_router.CONCERN,
    hf_checkpoint.CONCERN,
    model_shape.CONCERN,
    fsdp.CONCERN,
    precision.CONCERN,
    parallelism.CONCERN,
    moe.CONCERN,
    mtp.CONCERN,
    compute.CONCERN,
    rejection.CONCERN,  # what it derives is where checkpoints are looked for
    checkpoints.CONCERN,
    data.CONCERN,
    batches.CONCERN,
    rollout.CONCERN,
    nucleus.CONCERN,
    rewards.CONCERN,
    evaluation.CONCERN,  # its defaults are what rollout derives
    loss.CONCERN,
    kl.CONCERN,
    advantages.CONCERN,
    off_policy.CONCERN,
    distillation.CONCERN,
    optimizer.CONCERN,
    optimizer_state.CONCERN,
    critic.CONCERN,
    trainer.CONCERN,
    hooks.CONCERN,
    weight_sync.CONCERN,
    tracking.CONCERN,
    debug.CONCERN,
    check.CONCERN,
    custom_config.CONCERN,
    overwrites.CONCERN,
)


@dataclass(frozen=True)
class FlagGroup:
    """Flags under one heading of ``--help`` and of the flag page."""

    title: str
    about: str
    flags: tuple[Flag, ...]


@cache
def declared_groups() -> tuple[FlagGroup, ...]:
    """Every group declared by hand, then what megatron-core's configs add."""
    declarations = [item for concern in CONCERNS for item in concern.flags.items()]
    groups = [
        FlagGroup(title, (cls.__doc__ or "").splitlines()[0], flags_of(cls)) for title, cls in declarations
    ]
    dests = {spec.dest for group in groups for spec in group.flags}
    names = {name for group in groups for spec in group.flags for name in spec.names}
    generated = megatron_flags(dests, names)
    about = "Fields of megatron-core's config dataclasses that no other group declares."
    return (*groups, FlagGroup("megatron-core", about, tuple(generated)))


def documented_groups() -> tuple[FlagGroup, ...]:
    """The declared groups and the embedded engine's: every flag that is a :class:`Flag`."""
    flags = tuple(engines.embedded_server_flags())
    return (*declared_groups(), FlagGroup("embedded engine", "Server options of the embedded engine.", flags))


@cache
def shipped_code() -> frozenset[str]:
    """The dotted paths that are defaults of flags."""
    specs = (spec for group in declared_groups() for spec in group.flags)
    return frozenset(spec.default for spec in specs if spec.dotted_path and isinstance(spec.default, str))


def derive(args: Namespace) -> None:
    """Fills in ``args`` in place.

    Raises:
        UsageError: flags, or a flag and the checkpoint, contradict each other.
    """
    for concern in CONCERNS:
        concern.derive(args)


def derived_names() -> set[str]:
    """The names of ``args`` that ``derive`` sets, and those that become known in a run."""
    classes = [Facts, *(concern.derived for concern in CONCERNS if concern.derived)]
    return {field.name for cls in classes for field in fields(cls)}


def notes(args: Namespace) -> Iterator[str]:
    """What of the flags as given, before anything is derived, will have no effect."""
    specs = [spec for group in declared_groups() for spec in group.flags if spec.idle_without]
    for spec in specs:
        value = getattr(args, spec.dest)
        if value != spec.default:
            shown = "" if isinstance(value, bool) else f" {value}"
            yield f"{spec.names[0]}{shown}: has no effect without {spec.idle_without}"
    for concern in CONCERNS:
        yield from concern.notes(args)


def contradictions(args: Namespace) -> Iterator[str]:
    """What is wrong with the flags themselves, one line each."""
    for concern in CONCERNS:
        yield from concern.contradictions(args)


def findings(args: Namespace) -> Iterator[str]:
    """What is wrong with what they point to, one line each, the cheaper looks first."""
    for concern in CONCERNS:
        yield from concern.missing(args)
    for concern in CONCERNS:
        yield from unusable_code(args, concern.specs(), shipped_code())
    for concern in CONCERNS:
        yield from concern.unusable(args)
