"""Random weight updates in a row, and what engines must hold after each, which no code of ours computes.

with row_of_syncs(directory) as row:
    row.take(draw(7))        # raises AssertionError where an engine holds, or says, anything else
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.client import EngineClient
from slime.config.run import run_config
from slime.training.weights import Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server
from tests.engines.in_process import InProcessEngine
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.reference_formats import BLOCK, GROUP, reference_checkpoint
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_int4 import main as to_int4

TRANSPORTS = ("handle", "broadcast", "handle and broadcast", "disk", "delta")
MODELS = ("qwen3", "llama", "qwen3_moe")
CONVERTERS = {
    "fp8": (to_fp8, ["--block-size", *map(str, BLOCK)]),
    "int4": (to_int4, ["--group-size", str(GROUP)]),
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANK, ALPHA, ADAPTER = 4, 8.0, "adapter"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
FILE = "model.safetensors"
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Draw:
    """A trainer and some updates.

    Attributes:
        data: data-parallel ranks, over which experts are spread too.
        context: context-parallel ranks.
        adapts: whether the trainer has an adapter, with which its weights are merged.
    """

    seed: int
    model: str
    tied: bool
    form: str
    trains_in: str
    serves_in: str
    tensor: int
    pipeline: int
    virtual: bool
    expert: int
    data: int
    transport: str
    engines: int
    bucket: int
    syncs: int
    backend: str = "megatron"
    context: int = 1
    adapts: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


def draw(seed: int, transport: str | None = None, most_ranks: int = 4) -> Draw:
    """A setting, by chance."""
    rng = random.Random(seed)
    model, transport = rng.choice(MODELS), transport or rng.choice(TRANSPORTS)
    while True:
        tensor, pipeline, data = (rng.choice((1, 2)) for _ in range(3))
        if tensor * pipeline * data <= most_ranks:
            break
    expert = rng.choice((1, 2)) if model == "qwen3_moe" and tensor * data > 1 else 1
    forms = ("plain", "fp8", "int4") if model == "qwen3_moe" else ("plain", "fp8")  # int4 is for experts
    engines = rng.choice((1, 2))
    if transport == "handle":
        engines = min(engines, tensor * pipeline * data)
    drawn = Draw(
        seed=seed,
        model=model,
        tied=rng.random() < 0.5,
        form=rng.choice(forms),
        trains_in=rng.choice([*FLOATS]),
        serves_in=rng.choice([*FLOATS]),
        tensor=tensor,
        pipeline=pipeline,
        virtual=pipeline == 2 and rng.random() < 0.5,
        expert=expert,
        data=data,
        transport=transport,
        engines=2 if transport == "handle and broadcast" else engines,
        bucket=int(10 ** rng.uniform(0, 6)),
        syncs=rng.choice((1, 2, 3)),
    )
    return _on_a_backend(drawn, rng, most_ranks)


def _on_a_backend(one: Draw, rng: random.Random, most_ranks: int) -> Draw:
    """Returns the setting with what only one of the backends has."""
    if rng.random() < 0.3:
        alone = {"tensor": 1, "pipeline": 1, "virtual": False, "expert": 1}
        return replace(one, backend="fsdp", data=min(one.ranks, 2), engines=min(one.engines, 2), **alone)
    context = rng.choice((1, 2)) if 2 * one.ranks <= most_ranks else 1
    return replace(one, context=context, adapts=one.model != "qwen3_moe" and rng.random() < 0.5)


class Served:
    """Engines of one checkpoint, which serve all updates of a row that are for it.

    Their own weights are so much larger that no scale of theirs is kept.
    """

    def __init__(self, directory: Path, one: Draw) -> None:
        self._directory, self._one = directory, one
        plain = directory / "plain"
        save_tiny_hf(plain, one.model, seed=len(directory.name), tie_word_embeddings=one.tied)
        self.weights = load_file(plain / FILE)
        self._config = {file.name: file.read_bytes() for file in plain.glob("*.json")}
        larger = self._write(directory / "larger", {name: 1000 * t for name, t in self.weights.items()})
        self.path = larger
        if one.form in CONVERTERS:
            convert, flags = CONVERTERS[one.form]
            self.path = directory / "served"
            assert convert(["--model-dir", str(larger), "--save-dir", str(self.path), *flags]) == 0
        self._engines: list[InProcessEngine | Server] = []
        self._trained = 0

    def urls(self, count: int) -> list[str]:
        """Engines that have served before, and new ones."""
        if not self._engines:
            self._engines.append(InProcessEngine(self.path, dtype=self._one.serves_in))
        if len(self._engines) < count:
            flags = ("--skip-tokenizer-init", "--dtype", self._one.serves_in)
            self._engines.append(Server(self.path, *flags).wait_ready())
        return [
            one.endpoint.url if isinstance(one, InProcessEngine) else one.url for one in self._engines[:count]
        ]

    def train(self, rng: np.random.Generator, adapts: bool) -> tuple[Path, Path]:
        """Changes a few numbers of each tensor, and makes an adapter if there is to be one.

        Returns:
            The checkpoint that a trainer has after it, and the one that engines are to have.
        """
        for name, tensor in self.weights.items():
            changed = torch.from_numpy(rng.random(tensor.shape) < 0.03)
            noise = torch.from_numpy(rng.standard_normal(tensor.shape)).float()
            self.weights[name] = torch.where(changed, tensor + 0.1 * noise, tensor)
        self._trained += 1
        dtype = FLOATS[self._one.trains_in]
        has = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        trained = self._write(self._directory / f"trained-{self._trained}", has)
        if adapts:
            adapter = _random_adapter(rng, has)
            _write_adapter(trained / ADAPTER, adapter)
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
        key = (one.model, one.tied, one.form, one.trains_in, one.serves_in)
        if key not in self._served:
            directory = self._directory / "-".join(map(str, key))
            directory.mkdir()
            self._served[key] = Served(directory, one)
        served = self._served[key]
        endpoints = _endpoints(one, served.urls(one.engines))
        rng = np.random.default_rng(one.seed)
        pairs = [served.train(rng, one.adapts) for _ in range(one.syncs)]
        versions = range(self.version + 1, self.version + 1 + one.syncs)
        self.version += one.syncs
        args = _args(one, pairs[0][0], served.path, self._directory / f"versions-{self.version}")
        trained = [str(path) for path, _ in pairs]
        found = run_ranks(_update, one.ranks, args, trained, [*versions], endpoints, str(served.path))[0]
        for (_, wanted), version, engines in zip(pairs, versions, found, strict=True):
            fresh = _said_by_a_fresh_engine(wanted, one.serves_in)
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
    colocated = {"handle": len(urls), "handle and broadcast": 1}.get(one.transport, 0)
    return [EngineEndpoint(url, None, 1, i if i < colocated else None) for i, url in enumerate(urls)]


def _args(one: Draw, checkpoint: Path, served: Path, versions: Path) -> Any:
    layout: dict[str, Any] = {"tensor_model_parallel_size": one.tensor}
    layout |= {"pipeline_model_parallel_size": one.pipeline, "context_parallel_size": one.context}
    if one.virtual:
        layout |= {"virtual_pipeline_model_parallel_size": 2}
    if one.model == "qwen3_moe":
        layout |= {"expert_model_parallel_size": one.expert, "expert_tensor_parallel_size": 1}
        layout |= {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    dtype = FLOATS[one.trains_in]
    on_disk = one.transport in ("disk", "delta")
    sync = {
        "colocate": one.transport.startswith("handle"),
        "update_weight_buffer_size": one.bucket,
        "update_weight_transport": "disk" if on_disk else "nccl",
        "update_weight_mode": "delta" if one.transport == "delta" else "full",
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
        sync |= {"lora_rank": RANK, "lora_alpha": ALPHA}
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
    weights, load = build(args)
    update = WeightUpdate(run_config(args), weights, served=served)
    update.connect(endpoints)
    found = []
    for path, version in zip(trained, versions, strict=True):
        load(path)
        update.run(version)
        found.append([_looked_at(EngineClient(endpoint)) for endpoint in endpoints] if rank == 0 else [])
    update.disconnect()
    return found


def _megatron(args: Any) -> tuple[Weights, Callable[[str], None]]:
    """Builds a model in this rank; returns its weights, and what loads others into it."""
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

    return HfWeights(args, model), load


def _fsdp(args: Any) -> tuple[Weights, Callable[[str], None]]:
    """Builds and loads a model of the other backend."""
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.model import build_model

    config = run_config(args)
    model = build_model(config, init(config)[0])
    return FsdpHfTensors(model, args.params_dtype), lambda path: load_hf_weights(args, model, path)


def _looked_at(engine: EngineClient) -> dict[str, Any]:
    (held,) = engine.weights_checker("checksum")["ranks"]
    return {"weights": held["checksums"], "version": engine.weight_version(), "said": _generated(engine)}


def _generated(engine: EngineClient) -> list[list[float]]:
    """Tokens, and log-probs of prompt and answer."""
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = engine.request("POST", "/generate", body)
    told = answer["meta_info"]
    log_probs = [*told["input_token_logprobs"][1:], *told["output_token_logprobs"]]
    return [answer["output_ids"], [entry[0] for entry in log_probs]]


def _said_by_a_fresh_engine(path: Path, dtype: str) -> list[list[float]]:
    engine = InProcessEngine(path, dtype=dtype)
    try:
        return _generated(engine.client)
    finally:
        engine.stop()


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
