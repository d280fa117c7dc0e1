"""What the tests of ``--check`` share: flags for a config.json alone, and trainers that are really built.

args = checked_args(directory, tensor_model_parallel_size=2)
found, = run_ranks(states_of_trainers, 1, [args])      # bytes of what a rank has made
"""

import json
import weakref
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slime.arguments import validated_args
from slime.config.run import run_config
from slime.training.inputs import PackedInputs
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
from tests.families import FAMILIES, save_tiny_config

DENSE = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"head_dim": 16, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 1e4},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    **{"mlp_only_layers": [1], "decoder_sparse_step": 1},
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"model_type": "llama"},
    "qwen2": {name: value for name, value in DENSE.items() if name != "head_dim"} | {"model_type": "qwen2"},
    "qwen3": DENSE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": DENSE | EXPERTS | {"model_type": "qwen3_moe"},
}
"""config.json of the families that `tests.families` leaves out."""
NAMES = (*PLAIN, *FAMILIES)


def write_config(name: str, path: Path, **changes: Any) -> Path:
    """A directory with the config.json of a tiny model and nothing else."""
    if name in FAMILIES:
        return save_tiny_config(name, path, **changes)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(PLAIN[name] | changes))
    return path


def checked_args(directory: Path, world_size: int = 1, **flags: Any) -> Namespace:
    """The flags of a run of so many ranks, as the command line gives them."""
    given = {
        **{"hf_checkpoint": directory, "check": True, "debug_train_only": True, "num_rollout": 1},
        **{"disable_rollout_global_dataset": True, "disable_compute_advantages_and_returns": True},
        **{"rollout_batch_size": 8, "global_batch_size": 8, "loss_type": "sft_loss"},
        **{"rollout_function_path": "tests.check.harness.no_samples"},
        **{"actor_num_gpus_per_node": world_size, "make_vocab_size_divisible_by": 1},
        "freeze_indexer": "index_topk" in json.loads((directory / "config.json").read_text()),
        **flags,
    }
    words: list[str] = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return validated_args(words)


def no_samples(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    raise AssertionError("nothing is run")


def states_of_trainers(rank: int, runs: list[Namespace]) -> list[dict[str, int]]:
    """For each run the parameters of this rank and the bytes of weights, gradients and optimizer state."""
    from slime.backends.megatron_utils.initialize import init

    init(run_config(runs[0]))
    return [_states(args) for args in runs]


def _states(args: Namespace) -> dict[str, int]:
    from slime.backends.megatron_utils.optimizer import ensure_optimizer_states
    from slime.backends.megatron_utils.step import setup_model_and_optimizer

    state = setup_model_and_optimizer(run_config(args), lambda chunks: None)
    ensure_optimizer_states(state.optimizer)
    buffers = [b for chunk in state.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    frozen = [p for chunk in state.model for p in chunk.parameters() if not p.requires_grad]
    return {
        "parameters": sum(p.numel() for chunk in state.model for p in chunk.parameters()),
        "weights": sum(b.param_data.nbytes for b in buffers) + sum(p.nbytes for p in frozen),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(_optimizer_bytes(part, args) for part in _parts(state.optimizer)),
    }


def _parts(optimizer: Any) -> list[Any]:
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if part.optimizer is not None]


def _optimizer_bytes(part: Any, args: Namespace) -> int:
    moments = [t for state in part.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    copies = [] if args.params_dtype == torch.float32 else part.shard_fp32_from_float16_groups
    return sum(t.nbytes for t in moments) + sum(t.nbytes for group in copies for t in group)


class Saved:
    """Bytes of what autograd keeps, each storage once; weights are not among them.

    A storage is known by its address, not by that of its memory, which recomputation may give back meanwhile.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._uses: dict[int, int] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.most = 0

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._weights or not storage.nbytes():
            return tensor
        self._storages[place] = storage
        self._uses[place] = self._uses.get(place, 0) + 1
        self.most = max(self.most, self.now)
        holder = _Holder(tensor.detach())  # which a graph that nothing reads any more does not hold in turn
        weakref.finalize(holder, self._drop, place)
        return holder

    def unpack(self, held: Any) -> torch.Tensor:
        return held.tensor if isinstance(held, _Holder) else held

    def _drop(self, place: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._storages[place]


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def activations_of_trainers(rank: int, runs: list[Namespace], lengths: list[int]) -> list[dict[str, int]]:
    """For each run the bytes that autograd keeps after a forward pass, and the most it ever keeps."""
    from slime.backends.megatron_utils.initialize import init

    init(run_config(runs[0]))
    return [_activations(args, lengths) for args in runs]


def _activations(args: Namespace, lengths: list[int]) -> dict[str, int]:
    from megatron.core.utils import get_model_config, unwrap_model

    from slime.backends.megatron_utils.data import _packed_seq_params
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.backends.megatron_utils.moe import in_half
    from slime.backends.megatron_utils.mtp_step import layers_of
    from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy

    (model,) = get_model(run_config(args))
    if args.params_dtype != torch.float32:
        model = in_half(get_model_config(model), model)
    tokens = torch.randint(args.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    saved = Saved([*model.parameters(), *model.buffers(), tokens])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        logits = model(
            input_ids=tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=_packed_seq_params(lengths, tokens.device),
        )
        log_probs, _ = vocab_parallel_log_prob_entropy(logits[0], tokens[0], None, entropy_gradient=False)
        loss = log_probs.sum()
        if (layers := layers_of(model)) is not None:
            batch = _micro_batch(tokens[0], lengths)
            loss = loss + layers.losses(unwrap_model(model), batch, ParallelContext()).sum()
        kept = saved.now
        loss.backward()
    return {"kept": kept, "most": saved.most, "logits": logits.nbytes, "left": saved.now}


def _micro_batch(tokens: torch.Tensor, lengths: list[int]) -> dict[str, Any]:
    """Samples of these lengths, every token but the first one of each being trained."""
    from slime.backends.megatron_utils.data import _packed_seq_params

    sequences = list(tokens.split(lengths))
    return {
        "inputs": PackedInputs.of([*map(SequenceInputs, sequences)], ParallelContext()),
        "unconcat_tokens": sequences,
        "loss_masks": [torch.ones(length - 1, dtype=torch.int) for length in lengths],
        "packed_seq_params": _packed_seq_params(lengths, tokens.device),
    }


def host_of_trainers(rank: int, args: Namespace) -> tuple[int, int, int]:
    """Bytes that a rank moves to the host to sleep, and those of the optimizer and of the model in a save."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from slime.backends.megatron_utils.checkpoint import trained_state
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.optimizer import ensure_optimizer_states
    from slime.backends.megatron_utils.step import setup_model_and_optimizer
    from slime.backends.megatron_utils.worker import trainer_memory

    init(run_config(args))
    state = setup_model_and_optimizer(run_config(args), lambda chunks: None)
    ensure_optimizer_states(state.optimizer)
    gathered = [
        part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        for part in _parts(state.optimizer)
    ]
    sharded = [
        x for x in trained_state(state).values() if isinstance(x, ShardedTensor | ShardedTensorFactory)
    ]
    saved = sum(each.data.nbytes for each in sharded)
    memory = trainer_memory(state.model, state.optimizer)
    memory.offload()
    asleep = sum(copy.nbytes for _, copy in memory._on_host)
    return asleep, sum(_tensor_bytes(found) for found in gathered), saved


def _tensor_bytes(found: Any) -> int:
    if isinstance(found, dict):
        return sum(map(_tensor_bytes, found.values()))
    return int(found.nbytes) if isinstance(found, torch.Tensor) else 0
