"""The trainers, and what each can do, as far as it has to be known before one is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Trainer:
    """One value of ``--train-backend``.

    Attributes:
        backend: dotted path of its `TrainBackend`, which only the trainer's own processes import.
        imports: modules that the fork server of these processes imports once for all.
        parameters: dotted path of a function of (args, role) that gives the parameters of a family's model,
            without the memory for it and without ranks; empty for a trainer without one.
        flag_group: heading of the flags that are its own; empty if it has none.
        checkpoint_format: what its checkpoints say in metadata.json; empty for anything that no other
            trainer says.
        transformers_model: it trains what ``transformers`` computes, whatever the architecture; else the
            families of `slime.models`.
        splits_weights_evenly: each rank has a part of every weight, instead of layers and slices of them.
        packs_any_attention: sequences of a packed row may be split, whatever the kind of attention.
        recomputes_layers: it heeds ``--recompute-*``.
        moves_expert_biases: it moves the biases by which a router chooses experts.
        has_router_losses: it has auxiliary losses of routers.
        replays_routes: it can be told which experts compute a token.
        reads: the flags generated from megatron-core that it reads; None for all of them.
        idle: other flags that say how numbers are computed, and that it has no use for.
        refused: flags that would change numbers or call a user's code: the value that asks for nothing, and
            what to do instead.
    """

    name: str
    backend: str
    imports: tuple[str, ...]
    parameters: str = ""
    flag_group: str = ""
    checkpoint_format: str = ""
    transformers_model: bool = False
    splits_weights_evenly: bool = False
    packs_any_attention: bool = True
    recomputes_layers: bool = True
    moves_expert_biases: bool = True
    has_router_losses: bool = True
    replays_routes: bool = True
    reads: frozenset[str] | None = None
    idle: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def wrote(self, checkpoint_format: str) -> bool:
        """Whether a checkpoint that says so may be its own."""
        if self.checkpoint_format:
            return checkpoint_format == self.checkpoint_format
        return checkpoint_format not in {trainer.checkpoint_format for trainer in TRAINERS.values()}


MEGATRON = Trainer(
    "megatron",
    backend="slime.backends.megatron_utils.worker.MegatronBackend",
    imports=("slime.backends.megatron_utils.worker", "torch._dynamo"),
    parameters="slime.backends.megatron_utils.model_on_paper.parameters",
)
_SHARDED = "wanted 1: FSDP shards every weight over all ranks"
_NO_MEGATRON = "leave it out, there is no Megatron"
FSDP = Trainer(
    "fsdp",
    backend="slime.backends.fsdp_utils.worker.FSDPBackend",
    imports=("slime.backends.fsdp_utils.worker",),
    flag_group="fsdp",
    checkpoint_format="fsdp_dcp",
    transformers_model=True,
    splits_weights_evenly=True,
    packs_any_attention=False,
    recomputes_layers=False,
    moves_expert_biases=False,
    has_router_losses=False,
    replays_routes=False,
    reads=frozenset(
        {
            *("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay"),
            *("deterministic_mode", "log_num_zeros_in_grad"),
        }
    ),
    idle=frozenset(
        {
            *("accumulate_allreduce_grads_in_fp32", "attention_backend", "ckpt_format"),
            *("make_vocab_size_divisible_by", "moe_router_dtype", "moe_enable_deepep"),
            *("moe_token_dispatcher_type", "no_ckpt_fully_parallel_save", "recompute_activations"),
        }
    ),
    refused={
        "tensor_model_parallel_size": (1, _SHARDED),
        "pipeline_model_parallel_size": (1, _SHARDED),
        "expert_model_parallel_size": (1, _SHARDED),
        "expert_tensor_parallel_size": (1, _SHARDED),
        "num_layers_per_virtual_pipeline_stage": (None, "leave it out"),
        "num_virtual_stages_per_pipeline_rank": (1, "leave it out"),
        "custom_megatron_init_path": (None, _NO_MEGATRON),
        "custom_megatron_before_log_prob_hook_path": (None, _NO_MEGATRON),
        "custom_megatron_before_train_step_hook_path": (None, _NO_MEGATRON),
        "custom_model_provider_path": (None, "leave it out, transformers provides the model"),
        "enable_mtp_training": (False, "it trains what transformers computes, which leaves these layers out"),
        "optimizer_cpu_offload": (False, "wanted --fsdp-cpu-offload"),
        "use_precision_aware_optimizer": (False, "leave it out"),
        "use_stateless_adam": (False, "leave it out"),
        "decoupled_lr": (None, "leave it out"),
        "decoupled_min_lr": (None, "leave it out"),
        "apply_wd_to_qk_layernorm": (False, "leave it out"),
        "release_train": (False, "leave it out"),
    },
)
TRAINERS = {trainer.name: trainer for trainer in (MEGATRON, FSDP)}


class NamesTrainer(Protocol):
    """``args``, of which one flag is read."""

    @property
    def train_backend(self) -> str: ...


def trainer_of(args: NamesTrainer) -> Trainer:
    """The trainer of a run. No other function reads ``--train-backend``: what a trainer can do is asked."""
    return TRAINERS[args.train_backend]
