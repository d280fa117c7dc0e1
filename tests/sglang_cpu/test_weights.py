"""After an update each rank of SGLang's holds the trainer's numbers, by its own checksums, however they came.

What it should hold is written down without code of ours (`tests.weight_sync.sglang_ranks`).
"""

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from slime.backends.sglang_utils.client import EngineClient
from slime.utils.types import EngineEndpoint
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.sglang_cpu.server import sglang_server
from tests.weight_sync.real_trainer import update_engines
from tests.weight_sync.sglang_ranks import rank_of_sglang

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" not in os.environ, reason="run by scripts/test-sglang.sh"),
]

WAYS: dict[str, dict[str, Any]] = {
    "handles": {"colocate": True},
    "handles of shards": {"colocate": True, "update_weight_transport": "shards"},
    "a process group": {},
    "a directory": {"update_weight_transport": "disk"},
}


SHAPE: dict[str, Any] = {"vocab_size": 190, "intermediate_size": 128, "tie_word_embeddings": False}


class Served(NamedTuple):
    """An engine, what it was started with, and what a trainer has."""

    endpoint: EngineEndpoint
    start: str
    trained: str

    def wanted(self) -> list[dict[str, str]]:
        """SGLang's checksum of each tensor of each rank, if it has the trainer's weights."""
        state = load_file(f"{self.trained}/model.safetensors")
        config, size = json.loads(Path(self.trained, "config.json").read_text()), self.endpoint.num_gpus
        return [
            {name: sha256(tensor.contiguous().numpy()).hexdigest()[:16] for name, tensor in held.items()}
            for held in (rank_of_sglang(state, config, rank, size) for rank in range(size))
        ]


@pytest.fixture(scope="module", params=[("qwen2", 1), ("llama", 2)], ids=str)
def served(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, size = request.param
    start, trained = (save_tiny_hf(tmp_path_factory.mktemp("hf"), model, seed, **SHAPE) for seed in (0, 1))
    log = tmp_path_factory.mktemp("served") / "server.log"
    with sglang_server(Path(start), log, "--skip-tokenizer-init", "--tp-size", size) as address:
        yield Served(EngineEndpoint(f"http://{address}", None, size, 0), start, trained)


def checksums(client: EngineClient) -> list[dict[str, str]]:
    """By rank, of each tensor."""
    ranks = client.weights_checker("checksum")["ranks"]
    assert [[place["tp_rank"] for place in rank["parallelism_info"]] for rank in ranks] == [
        [number] for number in range(len(ranks))
    ]
    return [rank["checksums"] for rank in ranks]


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_holds_the_trainers_numbers(way: str, served: Served, tmp_path: Path) -> None:
    size, wanted = served.endpoint.num_gpus, served.wanted()
    client = EngineClient(served.endpoint)
    client.update_weights_from_disk(served.start, weight_version="old")
    before = checksums(client)
    assert all(found.keys() == rank.keys() for found, rank in zip(before, wanted, strict=True))
    assert all(
        found[name] != rank[name]
        for found, rank in zip(before, wanted, strict=True)
        for name in rank
        if "norm" not in name
    )
    flags = WAYS[way] | {"tensor_model_parallel_size": size, "check_weight_checksums": True}
    flags |= {"update_weight_buffer_size": 60_000, "train_timeout": 600}
    flags |= {"update_weight_disk_dir": str(tmp_path), "synced_checkpoint": served.start}
    run_ranks(update_engines, size, make_args(served.trained, **flags), [served.endpoint])
    for rank, found in enumerate(checksums(client)):
        assert [name for name in found if found[name] != wanted[rank][name]] == [], rank
    assert client.weight_version() == "2"
