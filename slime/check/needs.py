"""The memory that each GPU of a run needs, by what needs it."""

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
    adapter_elements,
    counted,
    stage_parameters,
    total_of_any,
    whole_model,
    whole_parameters,
)
from slime.check.states import States, rank_states, sharded_states
from slime.config.memory import MemoryConfig
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
    def host_bytes(self) -> int:
        """Bytes of all ranks together, on however many nodes they are."""
        each = self.layout.world // len(self.stages)
        return each * sum(stage.host.total for stage in self.stages)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all snapshots in memory together."""
        each = self.layout.world // len(self.stages)
        return each * sum(stage.host.snapshots for stage in self.stages)

    @property
    def node(self) -> NodeHost:
        """The node whose host needs most."""
        return fullest_node(self.layout, self.per_node, [stage.host for stage in self.stages])


def trained_roles(config: MemoryConfig) -> list[RoleNeeds]:
    """The actor, and the critic where there is one; none of a run without a trainer."""
    if config.debug.debug_rollout_only:
        return []
    roles = [_role(config, "actor")]
    if config.critic.use_critic:
        roles.append(_role(filled(MemoryConfig, of_critic(config.flat)), "critic"))
    return roles


def _role(config: MemoryConfig, role: str) -> RoleNeeds:
    layout = layout_of(config)
    tokens = micro_batch_tokens(config, layout)
    per_node = ranks_of_a_node(config, role == "critic")
    if trainer_of(config.trainer).splits_weights_evenly:
        whole = total_of_any(config, role)
        adapters = adapter_elements(config, role)
        states = sharded_states(config, sum(whole.values()), adapters, layout.world)
        stage = StageNeeds(whole, states, None, rank_host(config, states, role == "critic"))
        return RoleNeeds(role, whole, layout, tokens, [stage], per_node)
    every = whole_parameters(config, role)
    stages = [_stage(config, layout, stage, tokens, every, role) for stage in range(layout.pp)]
    return RoleNeeds(role, whole_model(config, role, every), layout, tokens, stages, per_node)


def _stage(
    config: MemoryConfig,
    layout: Layout,
    stage: int,
    tokens: int | None,
    whole: Sequence[WholeParameter],
    role: str,
) -> StageNeeds:
    chunks = stage_parameters(config, layout, stage, whole, role)
    every: list[Parameter] = [parameter for chunk in chunks for parameter in chunk]
    kept = None
    if tokens is not None and not not_estimated(config):
        kept = activations(config, layout, stage, tokens, role)
    states = rank_states(config, layout, chunks)
    return StageNeeds(counted(every), states, kept, rank_host(config, states, role == "critic"))
