"""The gated delta net of Qwen3-Next and Qwen3.5 over packed batches, its heads split over tensor parallelism.

megatron-core's own neither takes packed sequences nor runs without kernels for GPUs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from slime.models.linear_attention import DeltaNetSizes
from slime.training.packed_layout import PackedLayout
from slime_plugins.models.delta_rule import gated_delta_rule


class CausalConv(torch.nn.Module):
    """A convolution over the last tokens of a segment, each feature of this rank's heads by itself."""

    def __init__(self, config: TransformerConfig, features: int, kernel: int) -> None:
        super().__init__()
        weight = torch.empty(features, 1, kernel, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight.uniform_(-(kernel**-0.5), kernel**-0.5))
        _mark_split(self.weight)

    def forward(self, x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """x: [rows, features] of whole segments."""
        lead = self.weight.size(-1) - 1
        # Zeros before each segment keep those before it out.
        rows = torch.arange(x.size(0), device=x.device) + lead * layout.piece_numbers
        apart = x.new_zeros(x.size(0) + lead * len(layout.pieces), x.size(1))
        apart = apart.index_copy(0, rows + lead, x)
        out = F.conv1d(apart.T[None], self.weight, groups=x.size(1))[0].T
        return out.index_select(0, rows)


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head, then times silu of a gate; every tensor-parallel rank has the same weight."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self._eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Both [rows, heads, width]."""
        weight = copy_to_tensor_model_parallel_region(self.weight)  # others have other heads
        normed = weight * F.rms_norm(x.float(), weight.shape, None, self._eps).type_as(x)
        return (normed * F.silu(gate.float())).type_as(x)


class GatedDeltaNet(MegatronModule):
    """The layer in the place of self-attention; parameters have the names of megatron-core's layer.

    ``in_proj`` has the rows of each key head together, see `slime.models.linear_attention.ByKeyHead`. Under
    context parallelism each rank computes the convolution and the rule for all tokens, as their states follow
    from one another, and keeps its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        sizes: DeltaNetSizes,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.layer_number, self.sizes = layer_number, sizes
        self._cp_group, self.tp_group = groups.cp, groups.tp
        if sizes.key_heads % groups.tp.size():
            raise ValueError(
                f"--tensor-model-parallel-size {groups.tp.size()}: wanted a divisor of linear_num_key_heads "
                f"{sizes.key_heads} (config.json)"
            )
        parallel: dict[str, Any] = {"config": config, "bias": False, "tp_group": groups.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sizes.projected,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **parallel,
        )
        ranks, heads = groups.tp.size(), sizes.key_heads * sizes.ratio
        self.conv1d = CausalConv(config, sizes.mixed // ranks, sizes.kernel)
        self.dt_bias = _split_parameter(torch.ones(heads // ranks), config)
        self.A_log = _split_parameter(torch.empty(heads // ranks).uniform_(1, 16).log(), config)
        self.out_norm = GatedNorm(config, sizes.value)
        self.out_proj = RowParallelLinear(
            heads * sizes.value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **parallel,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [length, batch, hidden], packed ones with a batch of 1; returns the same shape."""
        del attention_mask
        projected = self.in_proj(hidden_states)[0]
        length, batch = projected.shape[:2]
        if packed_seq_params is not None:
            layout = PackedLayout.of(packed_seq_params)
        else:
            boundaries = [i * length for i in range(batch + 1)]
            layout = PackedLayout.from_boundaries(boundaries, projected.device)
        rows = projected.transpose(0, 1).flatten(0, 1)
        if layout.num_rows != rows.size(0):
            raise ValueError(f"packed batch: {rows.size(0)} tokens, its segments have {layout.num_rows}")
        out = self._mix(rows, layout).unflatten(0, (batch, length)).transpose(0, 1)
        return self.out_proj(out.contiguous())[0], None

    def _mix(self, rows: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """[rows, projected features of this rank] to [rows, its heads * value width]."""
        sizes = self.sizes
        query, key, value, gate, strength, decay = rows.unflatten(-1, (-1, sum(sizes.of_head))).split(
            sizes.of_head, dim=-1
        )
        mixed = torch.cat([query, key, value, strength, decay], dim=-1)
        out = self._read(*self._whole(mixed, layout))
        if layout.slots is not None:
            out = out.index_select(0, layout.own_rows)
        gate = gate.reshape(out.shape)
        return self.out_norm(out, gate).flatten(1)

    def _whole(self, mixed: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, PackedLayout]:
        """The rows of all context-parallel ranks in their order, and where their segments are."""
        if layout.slots is None:
            return mixed, layout
        gathered = gather_from_sequence_parallel_region(mixed, group=self._cp_group)
        return gathered.index_select(0, layout.slots.to(mixed.device)), layout.whole

    def _read(self, mixed: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """[rows, key heads, their features] to [rows, heads, value width]."""
        sizes = self.sizes
        convolved, strength, decay = mixed.split([sum(sizes.of_head[:3]), sizes.ratio, sizes.ratio], dim=-1)
        convolved = F.silu(self.conv1d(convolved.flatten(1), layout)).view_as(convolved)
        query, key, value = convolved.split(sizes.of_head[:3], dim=-1)
        decay = F.softplus(decay.flatten(1).float() + self.dt_bias.float())
        return gated_delta_rule(
            query,
            key,
            value.unflatten(-1, (sizes.ratio, -1)).flatten(1, 2),
            -self.A_log.float().exp() * decay,
            strength.flatten(1).sigmoid(),
            layout,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns what megatron-core's checkpoints hold: whole parameters."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        split = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        axes = dict.fromkeys(split, 0)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            split, prefix, axes, sharded_offsets, **groups
        )
        for name in ("in_proj", "out_norm", "out_proj"):
            found |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return found


def _mark_split(parameter: torch.nn.Parameter) -> None:
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def _split_parameter(start: torch.Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """One that has a number of each of this rank's heads."""
    parameter = torch.nn.Parameter(start.to(config.params_dtype))
    _mark_split(parameter)
    return parameter
