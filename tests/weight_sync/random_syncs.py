"""Random weight updates in a row, and what engines must hold after each, which no code of ours computes.

with row_of_syncs(directory) as row:
    row.take(draw(7))        # raises AssertionError where an engine holds, or says, anything else
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.client import EngineClient
from slime.config.lora import SERVED_ADAPTER
from slime.config.run import run_config
from slime.training.weights import ADAPTER as ADAPTER_ALONE
from slime.training.weights import BASE, Weights
from slime.utils.tensor_bucket import serialize_tensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports.delta import DeltaTransport
from slime.weight_sync.update import AdapterWeights, WeightUpdate
from tests.engines.embedded import Server
from tests.engines.in_process import InProcessEngine
from tests.families import tiny_family
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.reference_formats import BLOCK, GROUP, reference_checkpoint
from tests.weight_sync.sync_draws import FROM_RANKS, ON_DISK, WITH_EXPERTS, Draw
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_int4 import main as to_int4
from tools.convert_hf_to_mxfp4 import main as to_mxfp4
from tools.convert_hf_to_mxfp8 import main as to_mxfp8

CONVERTERS = {
    "fp8": (to_fp8, ["--block-size", *map(str, BLOCK)]),
    "int4": (to_int4, ["--group-size", str(GROUP)]),
    "mxfp4": (to_mxfp4, []),
    "mxfp8": (to_mxfp8, []),
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANK, ALPHA, ADAPTER = 4, 8.0, "adapter"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
FILE = "model.safetensors"
Pair = tuple[torch.Tensor, torch.Tensor]


class Served:
    """Engines of one checkpoint, which serve all updates of a row that are for it.

    Their own weights are so much larger that no scale of theirs is kept.
    """

    def __init__(self, directory: Path, one: Draw) -> None:
        self._directory, self._one = directory, one
        plain = directory / "plain"
        seed, tied = len(directory.name), {"tie_word_embeddings": one.tied}
        if one.model == "gpt_oss":
            tiny_family(one.model, plain, seed, num_hidden_layers=4, **tied)
        else:
            wide = {"moe_intermediate_size": 64} if one.model == "qwen3_moe" else {}  # whole groups of MXFP8
            save_tiny_hf(plain, one.model, seed, **tied, **wide)
        self.weights = load_file(plain / FILE)
        self._config = {file.name: file.read_bytes() for file in plain.glob("*.json")}
        larger = self._write(directory / "larger", {name: 1000 * t for name, t in self.weights.items()})
        self.path = larger
        if one.form in CONVERTERS:
            convert, flags = CONVERTERS[one.form]
            self.path = directory / "served"
            assert convert(["--model-dir", str(larger), "--save-dir", str(self.path), *flags]) == 0
        self._engines: list[InProcessEngine | Server] = []
        self._flags = {"dtype": one.serves_in, "tp_size": one.engine_ranks}
        self._flags |= {} if one.merges else {"enable_lora": True, "max_lora_rank": RANK}
        self._trained = 0

    def urls(self, count: int) -> list[str]:
        """Engines that have served before, and new ones."""
        if not self._engines:
            self._engines.append(InProcessEngine(self.path, **self._flags))
        if len(self._engines) < count:
            flags = ["--skip-tokenizer-init", "--dtype", self._one.serves_in]
            flags += ["--tp-size", str(self._one.engine_ranks)]
            flags += [] if self._one.merges else ["--enable-lora", "--max-lora-rank", str(RANK)]
            self._engines.append(Server(self.path, *flags).wait_ready())
        return [
            one.endpoint.url if isinstance(one, InProcessEngine) else one.url for one in self._engines[:count]
        ]

    def train(self, rng: np.random.Generator, one: Draw, is_first: bool) -> tuple[Path, Path]:
        """Changes a few numbers of each tensor, and makes an adapter if there is to be one.

        Beside an adapter the base is frozen: only the first update of a draw changes it.

        Returns:
            The checkpoint that a trainer has after it, and the one that engines are to have.
        """
        for name, tensor in self.weights.items() if one.merges or is_first else ():
            changed = torch.from_numpy(rng.random(tensor.shape) < 0.03)
            noise = torch.from_numpy(rng.standard_normal(tensor.shape)).float()
            self.weights[name] = torch.where(changed, tensor + 0.1 * noise, tensor)
        self._trained += 1
        dtype = FLOATS[self._one.trains_in]
        has = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        trained = self._write(self._directory / f"trained-{self._trained}", has)
        if one.adapts:
            adapter = _random_adapter(rng, has)
            _write_adapter(trained / ADAPTER, adapter)
        if one.adapts and one.merges:
            has |= {name: _merged(has[name], *pair) for name, pair in adapter.items()}
        return trained, reference_checkpoint(
            self.path, has, self._directory / f"wanted-{self._trained}", FLOATS[self._one.serves_in]
        )

    def _write(self, path: Path, weights: dict[str, torch.Tensor]) -> Path:
        path.mkdir()
        for name, content in self._config.items():
            (path / name).write_bytes(content)
        save_file(weights, path / FILE, {"format": "pt"})
        return path

    def stop(self) -> None:
        for engine in self._engines:
            engine.stop()


def _random_adapter(rng: np.random.Generator, weights: dict[str, torch.Tensor]) -> dict[str, Pair]:
    """A and B of each linear layer, whose product is exact in float32, in whatever order it is summed."""

    def numbers(rows: int, columns: int, unit: float) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-2, 3, (rows, columns))).float() * unit

    return {
        name: (numbers(RANK, weight.shape[1], 0.5), numbers(weight.shape[0], RANK, 2.0**-6))
        for name, weight in weights.items()
        if name.endswith("_proj.weight")
    }


def _merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    added = ALPHA / RANK * (up.double().numpy() @ down.double().numpy())
    return torch.from_numpy(weight.float().numpy() + added.astype(np.float32)).to(weight.dtype)


def _write_adapter(path: Path, adapter: dict[str, Pair]) -> None:
    path.mkdir()
    tensors = {}
    for name, (down, up) in adapter.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})


class Row:
    """Updates one after the other; engines live on from one to the next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._served: dict[tuple[Any, ...], Served] = {}
        self.version = 0

    def take(self, one: Draw) -> None:
        """Makes the updates of a draw.

        Raises:
            AssertionError: an engine holds, or generates, anything else than a fresh one of what was trained.
        """
        key = (one.model, one.tied, one.form, one.trains_in, one.serves_in, one.merges, one.engine_ranks)
        if key not in self._served:
            directory = self._directory / "-".join(map(str, key))
            directory.mkdir()
            self._served[key] = Served(directory, one)
        served = self._served[key]
        endpoints = _endpoints(one, served.urls(one.engines))
        rng = np.random.default_rng(one.seed)
        pairs = [served.train(rng, one, is_first=number == 0) for number in range(one.syncs)]
        versions = range(self.version + 1, self.version + 1 + one.syncs)
        self.version += one.syncs
        args = _args(one, pairs[0][0], served.path, self._directory / f"versions-{self.version}")
        trained = [str(path) for path, _ in pairs]
        found = run_ranks(_update, one.ranks, args, trained, [*versions], endpoints, str(served.path))[0]
        for (has, wanted), version, engines in zip(pairs, versions, found, strict=True):
            fresh = _said_by_a_fresh_engine(wanted, one, has / ADAPTER)
            digests = {name: _digest(tensor) for name, tensor in load_file(wanted / "held.data").items()}
            for engine in engines:
                assert engine["version"] == str(version), (one, engine["version"])
                wrong = [name for name, digest in digests.items() if engine["weights"].get(name) != digest]
                assert not wrong and engine["weights"].keys() == digests.keys(), (one, version, wrong)
                assert engine["said"] == fresh, (one, version)

    def stop(self) -> None:
        for served in self._served.values():
            served.stop()


def _endpoints(one: Draw, urls: list[str]) -> list[EngineEndpoint]:
    places = {"handle": len(urls), "shards": len(urls), "handle and broadcast": 1}
    colocated = places.get(one.transport, 0)
    size = one.engine_ranks
    return [
        EngineEndpoint(url, None, size, size * i if i < colocated else None) for i, url in enumerate(urls)
    ]


def _args(one: Draw, checkpoint: Path, served: Path, versions: Path) -> Any:
    layout: dict[str, Any] = {"tensor_model_parallel_size": one.tensor}
    layout |= {"pipeline_model_parallel_size": one.pipeline, "context_parallel_size": one.context}
    if one.virtual:
        layout |= {"virtual_pipeline_model_parallel_size": 2}
    if one.model in WITH_EXPERTS:
        layout |= {"expert_model_parallel_size": one.expert, "expert_tensor_parallel_size": 1}
        layout |= {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    dtype = FLOATS[one.trains_in]
    choice = "disk" if one.transport in ON_DISK else "shards" if one.transport in FROM_RANKS else "nccl"
    sync = {
        "colocate": one.transport.startswith(("handle", "shards")),
        "update_weight_buffer_size": one.bucket,
        "update_weight_transport": choice,
        "update_weight_mode": "delta" if "delta" in one.transport else "full",
        "update_weight_disk_dir": str(versions),
        "update_weight_disk_keep_files": False,
        "update_weight_local_checkpoint_dir": f"{versions}-local" if one.transport == "delta" else None,
        "update_weight_delta_encoding": random.Random(one.seed).choice(("xor", "overwrite")),
        "update_weight_delta_checksum": "xxh3-128",
        "synced_checkpoint": str(served),
    }
    if one.backend == "fsdp":
        sync |= {"train_backend": "fsdp", "trust_remote_code": False}
        sync |= {"gradient_checkpointing": False, "fsdp_cpu_offload": False}
    if one.adapts:
        sync |= {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_merge": one.merges}
    return make_args(checkpoint, params_dtype=dtype, bf16=dtype == torch.bfloat16, **layout, **sync)


def _update(
    rank: int,
    args: Any,
    trained: list[str],
    versions: list[int],
    endpoints: list[EngineEndpoint],
    served: str,
) -> list[list[dict[str, Any]]]:
    """What each engine holds and says after each version."""
    build = _fsdp if args.train_backend == "fsdp" else _megatron
    weights, beside, load = build(args)
    update = WeightUpdate(run_config(args), weights, served=served, adapters=beside)
    update.connect(endpoints)
    found = []
    for path, version in zip(trained, versions, strict=True):
        load(path)
        update.run(version)
        name = SERVED_ADAPTER if args.lora_rank and not args.lora_merge else None
        looked_at = [_looked_at(EngineClient(endpoint), name) for endpoint in endpoints] if rank == 0 else []
        found.append(looked_at)
    _require_all_to_write(update)
    update.disconnect()
    return found


def _require_all_to_write(update: WeightUpdate) -> None:
    """Changes in a directory are those of all ranks."""
    for transport in update._transports:
        if isinstance(transport, DeltaTransport):
            assert transport.source_ranks() == set(range(dist.get_world_size()))


def _megatron(args: Any) -> tuple[Weights, list[AdapterWeights], Callable[[str], None]]:
    """Builds a model in this rank; returns its weights, adapters beside them, and what loads others."""
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.lora_checkpoint import load_peft
    from slime.backends.megatron_utils.model_provider import get_model

    config = run_config(args)
    init(config)
    model = get_model(config)

    def load(path: str) -> None:
        load_hf_weights(args, model, path)
        if config.lora.adapts:
            load_peft(Path(path) / ADAPTER, args, model)

    if not config.lora.serves_adapter:
        return HfWeights(args, model), [], load
    return (
        HfWeights(args, model, BASE),
        [AdapterWeights(HfWeights(args, model, ADAPTER_ALONE), config.lora)],
        load,
    )


def _fsdp(args: Any) -> tuple[Weights, list[AdapterWeights], Callable[[str], None]]:
    """Builds and loads a model of the other backend."""
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.lora import load_peft
    from slime.backends.fsdp_utils.model import build_model

    config = run_config(args)
    model = build_model(config, init(config)[0])

    def load(path: str) -> None:
        load_hf_weights(args, model, path)
        if config.lora.adapts:
            load_peft(Path(path) / ADAPTER, model)

    if not config.lora.serves_adapter:
        return FsdpHfTensors(model, args.params_dtype), [], load
    base, alone = (FsdpHfTensors(model, args.params_dtype, form) for form in (BASE, ADAPTER_ALONE))
    return base, [AdapterWeights(alone, config.lora)], load


def _looked_at(engine: EngineClient, adapter: str | None) -> dict[str, Any]:
    (held,) = engine.weights_checker("checksum")["ranks"]
    said = _generated(engine, adapter)
    return {"weights": held["checksums"], "version": engine.weight_version(), "said": said}


def _generated(engine: EngineClient, adapter: str | None) -> list[list[float]]:
    """Tokens, and log-probs of prompt and answer."""
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = engine.request("POST", "/generate", body | ({"lora_path": adapter} if adapter else {}))
    told = answer["meta_info"]
    log_probs = [*told["input_token_logprobs"][1:], *told["output_token_logprobs"]]
    return [answer["output_ids"], [entry[0] for entry in log_probs]]


def _said_by_a_fresh_engine(path: Path, one: Draw, adapter: Path) -> list[list[float]]:
    lora = {} if one.merges else {"enable_lora": True, "max_lora_rank": RANK}
    engine = InProcessEngine(path, dtype=one.serves_in, **lora)
    try:
        if not one.merges:
            _load_adapter(engine.client, adapter)
        return _generated(engine.client, None if one.merges else SERVED_ADAPTER)
    finally:
        engine.stop()


def _load_adapter(engine: EngineClient, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    body = {"lora_name": SERVED_ADAPTER, "config_dict": config}
    body |= {"serialized_named_tensors": [serialize_tensors(tensors, share=False)]}
    engine.request("POST", "/load_lora_adapter_from_tensors", body)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(-1).view(torch.uint8).numpy(), digest_size=8).hexdigest()


@contextmanager
def row_of_syncs(directory: Path) -> Iterator[Row]:
    """A row whose engines stop at the end."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # as an engine's process has
    row = Row(directory)
    try:
        yield row
    finally:
        row.stop()
        dist.destroy_process_group()
