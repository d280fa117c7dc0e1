"""The memory that each GPU of a run needs, by what needs it."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slime.arguments.groups.critic import of_critic
from slime.check.activations import Activations, activations, micro_batch_tokens, not_estimated
from slime.check.host import NodeHost, RankHost, fullest_node, rank_host, ranks_of_a_node
from slime.check.layout import Layout, layout_of
from slime.check.parameters import (
    Kind,
    Parameter,
    WholeParameter,
    counted,
    stage_parameters,
    total_of_any,
    whole_model,
    whole_parameters,
)
from slime.check.states import States, rank_states, sharded_states
from slime.config.host import HostConfig
from slime.config.run import filled
from slime.config.trainers import trainer_of

_RESERVE = 0.06


def reserve(gpu_bytes: int) -> int:
    """Returns the reserve for what is not counted: CUDA's context, NCCL's buffers, workspaces, gaps between
    tensors.
    """
    return int(_RESERVE * gpu_bytes)


@dataclass(frozen=True)
class StageNeeds:
    """One rank of a pipeline stage; ``activations`` is None where they are not estimated."""

    parameters: dict[Kind, int]
    states: States
    activations: Activations | None
    host: RankHost

    @property
    def total(self) -> int:
        """Bytes at the worst moment of a step, without the reserve."""
        peak = self.activations.peak if self.activations else 0.0
        return self.states.weights + self.states.gradients + self.states.optimizer + int(peak)


@dataclass(frozen=True)
class RoleNeeds:
    """A trained model.

    Attributes:
        whole: its parameters as published.
        tokens: of a micro-batch on a rank; None where no flag limits them.
        per_node: ranks of a node.
    """

    role: str
    whole: dict[Kind, int]
    layout: Layout
    tokens: int | None
    stages: Sequence[StageNeeds]
    per_node: int

    @cached_property
    def fullest(self) -> int:
        """The stage whose ranks need most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def node(self) -> NodeHost:
        """The node whose host needs most."""
        return fullest_node(self.layout, self.per_node, [stage.host for stage in self.stages])


def trained_roles(args: Namespace) -> list[RoleNeeds]:
    """The actor, and the critic where there is one; none of a run without a trainer."""
    if args.debug_rollout_only:
        return []
    roles = [_role(args, "actor")]
    if args.use_critic:
        roles.append(_role(of_critic(args), "critic"))
    return roles


def _role(args: Namespace, role: str) -> RoleNeeds:
    layout = layout_of(args)
    tokens = micro_batch_tokens(args, layout)
    per_node = ranks_of_a_node(filled(HostConfig, args), role == "critic")
    if trainer_of(args).splits_weights_evenly:
        whole = total_of_any(args, role)
        states = sharded_states(args, sum(whole.values()), layout.world)
        stage = StageNeeds(whole, states, None, _host(args, states, role))
        return RoleNeeds(role, whole, layout, tokens, [stage], per_node)
    every = whole_parameters(args, role)
    stages = [_stage(args, layout, stage, tokens, every, role) for stage in range(layout.pp)]
    return RoleNeeds(role, whole_model(args, role, every), layout, tokens, stages, per_node)


def _stage(
    args: Namespace,
    layout: Layout,
    stage: int,
    tokens: int | None,
    whole: Sequence[WholeParameter],
    role: str,
) -> StageNeeds:
    chunks = stage_parameters(args, layout, stage, whole, role)
    every: list[Parameter] = [parameter for chunk in chunks for parameter in chunk]
    kept = None
    if tokens is not None and not not_estimated(args):
        kept = activations(args, layout, stage, tokens, role)
    states = rank_states(args, layout, chunks)
    return StageNeeds(counted(every), states, kept, _host(args, states, role))


def _host(args: Namespace, states: States, role: str) -> RankHost:
    return rank_host(filled(HostConfig, args), states, critic=role == "critic")
