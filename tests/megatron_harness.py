"""What trainer tests share: tiny random HF models, ``args``, and gloo ranks in processes of their own.

    def logits_of(rank, args, tokens):         # a module-level function, run by every rank
        init(args)
        ...
        return {"logits": tensor}              # anything torch.load(weights_only=True) accepts

    results = run_ranks(logits_of, 2, args, tokens)      # one result per rank

The ranks are forked from a server process that has imported the trainer already, so a call costs a fraction
of a second.
"""

import contextlib
import gc
import io
import os
import signal
import socket
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from slime.models import shape_from_hf_config
from slime.models.shape import pad_vocab_size
from tests.forking import forking
from tests.run_args import with_groups

MODEL_TYPES = ("qwen2", "qwen3", "llama")
# One layer is dense. The weights of experts sum up to 1, as in the published models.
TINY_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    **{"mlp_only_layers": [1], "decoder_sparse_step": 1},
}


def tiny_hf_model(model_type: str, seed: int = 0, **overrides):
    """A random float32 ``transformers`` model of 4 layers whose every parameter matters to its logits."""
    import transformers

    classes = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
    config_class = getattr(transformers, classes[model_type] + "Config")
    model_class = getattr(transformers, classes[model_type] + "ForCausalLM")
    shape = {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"head_dim": 16, "tie_word_embeddings": model_type == "qwen3"},
    }
    if model_type == "qwen2":
        del shape["head_dim"]
    if model_type == "qwen3_moe":
        shape |= TINY_EXPERTS
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **overrides}))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.add_(0.3 * noise)
            elif "bias" in name:
                param.add_(0.1 * noise)
            else:
                param.mul_(3)
    return model.float().eval()


def save_tiny_hf(path: Path | str, model_type: str, seed: int = 0, **overrides) -> str:
    """Writes such a model as a HF checkpoint directory (no tokenizer) and returns its path."""
    tiny_hf_model(model_type, seed, **overrides).save_pretrained(path)
    return str(path)


def make_args(hf_checkpoint: Path | str, **overrides) -> Namespace:
    """The ``args`` that building, loading and syncing a float32 model read; override or add any of them.

    ``shape`` takes the place of what config.json says.
    """
    tensor_parallel = overrides.get("tensor_model_parallel_size", 1)
    shape = overrides.pop("shape", None) or shape_from_hf_config(hf_checkpoint)
    defaults = {
        **shape,
        "hf_checkpoint": str(hf_checkpoint),
        "padded_vocab_size": pad_vocab_size(shape["vocab_size"], 1, tensor_parallel),
        "params_dtype": torch.float32,
        "bf16": False,
        "fp16": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "allgather_cp": False,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
        "seed": 1234,
        "distributed_timeout_minutes": 10,  # ends nothing but a hang: a rank may be late on a busy machine
        "calculate_per_token_loss": False,
        "train_backend": "megatron",
        "colocate": False,
        "check_weight_update_equal": False,
        "check_weight_checksums": False,
        "update_weight_transport": "nccl",
        "update_weight_buffer_size": 512 * 1024**2,
        "train_timeout": 120,
    }
    return with_groups({**defaults, **overrides})


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 400.0) -> list[Any]:
    """Calls ``function(rank, *args)`` in ``world_size`` processes with torch.distributed's environment set.

    What a rank has started and left running, as saving a checkpoint does, is killed with it.

    Raises:
        RuntimeError: a rank raised or died; the message holds its traceback, and those of others that have
            done so meanwhile: one of them may be the cause. The rest is killed.
        TimeoutError: a rank gave no result within ``timeout`` seconds.
    """
    context = forking()
    meeting_point = _reserved()
    port = meeting_point.getsockname()[1]
    processes, pipes = [], {}
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(sender, function, rank, world_size, port, args))
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    try:
        return _collect(pipes, world_size, time.monotonic() + timeout)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(timeout=5)
            _kill_group(process)
            process.join()
        meeting_point.close()


def _reserved() -> socket.socket:
    """Has a port that the kernel gives nobody else; a store may listen there, as it shares addresses."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("", 0))
    return found


def _kill_group(rank: BaseProcess) -> None:
    """Kills a rank and its children, which are found even if the rank has died before them."""
    rank.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)


def _collect(pipes: dict[Connection, int], world_size: int, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < world_size:
        ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pipes.values())} of {world_size} gave no result in time")
        outcomes = {pipes.pop(receiver): _received(receiver) for receiver in ready}
        if errors := [f"rank {rank}{told['error']}" for rank, told in outcomes.items() if "error" in told]:
            raise RuntimeError("\n".join(errors))
        results |= {rank: outcome["result"] for rank, outcome in outcomes.items()}
    return [results[rank] for rank in range(world_size)]


def _received(receiver: Connection) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=True)
    except EOFError:
        return {"error": " died"}


def _rank_main(sender: Connection, function: Callable, rank: int, world_size: int, port: int, args) -> None:
    # Children belong to this group, and to nothing else that is known once this process is gone.
    os.setpgid(0, 0)
    os.set_inheritable(sender.fileno(), False)  # or torch's manager of shared memory keeps it open
    gc.freeze()  # what was preloaded, else each collection goes through all of it
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        outcome = {"result": function(rank, *args)}
    except Exception:
        outcome = {"error": f":\n{traceback.format_exc()}"}
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    sender.send_bytes(buffer.getvalue())
    sender.close()
    if torch.distributed.is_initialized() and "result" in outcome:
        torch.distributed.destroy_process_group()
    # Skips the wait for helper threads of gloo, which a failed peer may have left hanging.
    os._exit(0)
