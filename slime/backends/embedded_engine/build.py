"""Puts an engine together from the server's arguments."""

import random
from pathlib import Path

import torch

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.adapters import Adapters
from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.checkpoint import load_checkpoint, load_random
from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.executor import Executor
from slime.backends.embedded_engine.grammar.compiler import GrammarCompiler
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.kv_cache import KVCache, LayerCache
from slime.backends.embedded_engine.memory_occupation import MemoryOccupation
from slime.backends.embedded_engine.model import CausalLM
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.parameters import Parameters
from slime.backends.embedded_engine.routes import RouteRecorder
from slime.backends.embedded_engine.scheduler import Scheduler
from slime.backends.embedded_engine.serving_model import ModelExecutor
from slime.backends.embedded_engine.stopping import StopChecker
from slime.backends.embedded_engine.tokenizer import Tokenizer
from slime.backends.embedded_engine.weight_checker import WeightChecker
from slime.backends.embedded_engine.weight_updater import WeightUpdater
from slime.models import family_of
from slime.models.checkpoint.quantization import read_quantization
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.hf_config import HfConfig
from slime.utils.accelerator import free_memory, gpu_count

_MAX_RUNNING_REQUESTS = 256
_PREFILL_CHUNK = 1024
_CACHE_SHARE_OF_MEMORY = 0.3


def build_server(args: EmbeddedServerArgs) -> ServerState:
    """Loads the model and wires the parts; the engine is not started yet.

    Raises:
        ValueError: a checkpoint or an argument that cannot be served.
    """
    device = engine_device(args.device, args.base_gpu_id)
    if args.tp_size > 1 and device.type != "cpu":
        raise ValueError(
            f"--tp-size {args.tp_size}: on a GPU this engine takes one (wanted: 1, or --device cpu)"
        )
    config = ModelConfig.from_directory(args.model_path, args.dtype, device)
    tokenizer, grammars = None, None
    if not args.skip_tokenizer_init:
        tokenizer = Tokenizer(args.tokenizer_path or args.model_path, args.trust_remote_code)
        grammars = GrammarCompiler(tokenizer.hf, config.shape.vocab_size, config.eos_token_ids)
    context = args.context_length or config.shape.max_position_embeddings
    limits = _limits(args, config, context)
    executor, parameters = build_executor(args.model_path, config, limits, args.enable_return_routed_experts)
    _load(args, parameters)
    stops = StopChecker(config.eos_token_ids, tokenizer)
    scheduler = Scheduler(executor, stops, limits, args.enable_deterministic_inference)
    scheduler.weight_version = args.weight_version
    like = torch.empty(0, dtype=config.dtype, device=device)
    scheduler.adapters = Adapters(parameters.linear_layers, like, _max_rank(args))
    engine = Engine(scheduler, executor.cache)
    return ServerState(
        args=args,
        config=config,
        context_length=context,
        max_running_requests=limits.rows,
        max_total_tokens=limits.tokens,
        parameters=parameters,
        engine=engine,
        tokenizer=tokenizer,
        updater=WeightUpdater(engine, parameters, _stored_format(args), args.tp_size),
        checker=WeightChecker(parameters, args.tp_size),
        memory=MemoryOccupation(engine, parameters, args.enable_memory_saver, args.enable_weights_cpu_backup),
        model_path=args.model_path,
        served_model_name=args.served_model_name or args.model_path,
        grammars=grammars,
    )


def build_executor(
    path: str | Path, config: ModelConfig, limits: Limits, records_routes: bool = False
) -> tuple[ModelExecutor, NamedWeights]:
    """What computes the model of a checkpoint directory, and its weights, which are not loaded yet.

    Raises:
        ValueError: neither our own forward pass nor ``transformers`` computes that model, it is to record
            routes and has no experts, or it has linear attention that this ``transformers`` has otherwise.
    """
    moe = config.shape.moe
    if records_routes and moe is None:
        raise ValueError(f"--enable-return-routed-experts: {config.shape.model_type} has no experts")
    if family_of(config.shape.model_type).like_llama:
        parameters = Parameters(config)
        cache = KVCache(config, limits.rows, limits.context, limits.tokens)
        recorder = RouteRecorder(moe) if records_routes and moe is not None else None
        return Executor(CausalLM(config, parameters, limits.context, recorder), cache), parameters
    # takes seconds, which a model of our own need not wait for
    from slime.backends.embedded_engine.row_executor import RowExecutor, StateExecutor
    from slime.backends.embedded_engine.row_states import StateCache
    from slime.backends.embedded_engine.transformers_model import (
        TransformersExecutor,
        TransformersLM,
        load_model,
    )
    from slime.backends.embedded_engine.transformers_weights import TransformersWeights

    model = load_model(path, config)
    weights = TransformersWeights(config, model)
    model.to(config.device)  # what belongs to no checkpoint
    computed = TransformersLM(config, model, records_routes)
    if not computed.by_row:
        return TransformersExecutor(computed), weights
    room = limits.rows, limits.context, limits.tokens
    if computed.has_states:
        _expect_states()
        return StateExecutor(computed, StateCache(config, *room)), weights
    return RowExecutor(computed, LayerCache(config, *room)), weights


def _expect_states() -> None:
    """Refuses a ``transformers`` whose linear attention asks a cache by other names than ours has."""
    import transformers

    if not hasattr(transformers.Cache, "is_recording_past"):
        raise ValueError(
            f"linear attention: transformers {transformers.__version__} has it in another way than the "
            "embedded engine (wanted: transformers>=5.21, or SGLang)"
        )


def _max_rank(args: EmbeddedServerArgs) -> int:
    """The largest rank of adapters, 0 for none.

    Raises:
        ValueError: it is not given, as in SGLang.
    """
    if args.enable_lora and args.max_lora_rank is None:
        raise ValueError("--enable-lora: needs --max-lora-rank, the largest rank of adapters")
    return (args.max_lora_rank or 0) if args.enable_lora else 0


def _stored_format(args: EmbeddedServerArgs) -> StoredFormat | None:
    """Returns the format of a quantised checkpoint; random weights have none."""
    quantized = read_quantization(HfConfig.read(args.model_path)) is not None
    return StoredFormat(args.model_path) if quantized and args.load_format != "dummy" else None


def _load(args: EmbeddedServerArgs, parameters: NamedWeights) -> None:
    if args.load_format == "dummy":
        seed = args.random_seed if args.random_seed is not None else random.getrandbits(32)
        load_random(parameters, seed)
    else:
        load_checkpoint(parameters, args.model_path)


def _limits(args: EmbeddedServerArgs, config: ModelConfig, context: int) -> Limits:
    rows = args.max_running_requests or _MAX_RUNNING_REQUESTS
    tokens = args.max_total_tokens
    if tokens is None:
        memory = free_memory(config.device) * _CACHE_SHARE_OF_MEMORY
        tokens = min(int(memory / KVCache.bytes_per_token(config)), rows * context)
    chunk = args.chunked_prefill_size or _PREFILL_CHUNK
    return Limits(rows=rows, tokens=tokens, chunk=chunk if chunk > 0 else context, context=context)


def engine_device(name: str | None, gpu: int) -> torch.device:
    """Returns the device of ``--device`` and ``--base-gpu-id``; by default a GPU if there is one.

    Raises:
        ValueError: there is no such GPU.
    """
    count = gpu_count()
    if name == "cpu" or (name is None and not count):
        return torch.device("cpu")
    if not count:
        raise ValueError("--device cuda: no GPU is visible to this process (wanted: cpu, or leave it out)")
    if gpu >= count:
        raise ValueError(f"--base-gpu-id {gpu}: this machine has {count} GPUs (wanted: 0 to {count - 1})")
    return torch.device("cuda", gpu)
