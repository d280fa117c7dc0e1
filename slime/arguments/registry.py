"""Every config group, and what is asked of each of them in turn."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, partial

from slime.arguments.core.flag import Flag, changed, flags_of
from slime.arguments.core.group import ConfigGroup, Rule
from slime.arguments.core.runtime_context import RuntimeContext
from slime.arguments.groups import (
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
    kl,
    lora,
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
    policies,
    precision,
    profiling,
    rejection,
    rewards,
    rollout,
    router,
    run_files,
    slime_router,
    token_log,
    tracking,
    trainer,
    weight_sync,
)
from slime.arguments.groups.megatron import megatron_flags
from slime.arguments.validate.user_code import unusable_code
from slime.config.hooks import HookConfig

CONFIG_GROUPS: tuple[ConfigGroup, ...] = (
    run_files.CONFIG_GROUP,
    cluster.CONFIG_GROUP,
    engines.CONFIG_GROUP,
    policies.CONFIG_GROUP,
    router.CONFIG_GROUP,
    slime_router.CONFIG_GROUP,
    hf_checkpoint.CONFIG_GROUP,
    model_shape.CONFIG_GROUP,
    fsdp.CONFIG_GROUP,
    precision.CONFIG_GROUP,
    parallelism.CONFIG_GROUP,
    moe.CONFIG_GROUP,
    mtp.CONFIG_GROUP,
    compute.CONFIG_GROUP,
    rejection.CONFIG_GROUP,  # what it derives is where checkpoints are looked for
    checkpoints.CONFIG_GROUP,
    data.CONFIG_GROUP,
    batches.CONFIG_GROUP,
    rollout.CONFIG_GROUP,
    nucleus.CONFIG_GROUP,
    token_log.CONFIG_GROUP,
    rewards.CONFIG_GROUP,
    evaluation.CONFIG_GROUP,  # its defaults are what rollout derives
    loss.CONFIG_GROUP,
    kl.CONFIG_GROUP,
    advantages.CONFIG_GROUP,
    off_policy.CONFIG_GROUP,
    distillation.CONFIG_GROUP,
    optimizer.CONFIG_GROUP,
    optimizer_state.CONFIG_GROUP,
    critic.CONFIG_GROUP,
    trainer.CONFIG_GROUP,
    lora.CONFIG_GROUP,
    ConfigGroup({"trainer hooks": HookConfig}),
    weight_sync.CONFIG_GROUP,
    tracking.CONFIG_GROUP,
    debug.CONFIG_GROUP,
    profiling.CONFIG_GROUP,
    check.CONFIG_GROUP,
    custom_config.CONFIG_GROUP,
    overwrites.CONFIG_GROUP,
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
    declarations = [item for group in CONFIG_GROUPS for item in group.flags.items()]
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


@cache
def derived_names() -> frozenset[str]:
    """The names of ``args`` that ``derive`` sets, and those that become known in a run."""
    unset = frozenset(name for group in CONFIG_GROUPS for name in group.unset_names())
    return unset | {field.name for field in fields(RuntimeContext)}


@cache
def _by_option() -> dict[str, Flag]:
    return {name: spec for group in declared_groups() for spec in group.flags for name in spec.names}


def is_idle(args: Namespace, spec: Flag) -> bool:
    """Whether the flag without which this one has no effect is not given."""
    if not spec.idle_without:
        return False
    other = _by_option().get(spec.idle_without)
    return other is None or vars(args).get(other.dest, other.default) == other.default


def notes(args: Namespace) -> Iterator[str]:
    """What of the flags as given, before anything is derived, will have no effect."""
    idle = (spec for group in declared_groups() for spec in group.flags if is_idle(args, spec))
    for spec, value in changed(args, idle):
        shown = "" if isinstance(value, bool) else f" {value}"
        yield f"{spec.names[0]}{shown}: has no effect without {spec.idle_without}"
    for group in CONFIG_GROUPS:
        yield from group.notes(args)


def unusable() -> Iterator[Rule]:
    """What looks at the contents of what flags point to, users' code first; it may take seconds."""
    for group in CONFIG_GROUPS:
        yield partial(_unusable_code, group)
    for group in CONFIG_GROUPS:
        yield group.unusable


def _unusable_code(group: ConfigGroup, args: Namespace) -> Iterator[str]:
    return unusable_code(args, group.specs(), shipped_code())
