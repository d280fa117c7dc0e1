"""A trainer that is killed within an update of engines that outlive it: its successor gives them all weights.

The processes are real ones, and the engine is somebody else's: nobody starts it anew in between.
"""

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.sglang_utils.client import EngineClient
from slime.backends.sglang_utils.external import ExternalEngines
from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server
from tests.megatron_harness import run_ranks
from tests.run_args import run_args
from tests.weight_sync.test_messages import Probes, Source, checkpoints, gap, probe, said
from tests.weight_sync.test_nixl import needs_nixl

__all__ = ["checkpoints", "said"]  # fixtures

pytestmark = pytest.mark.slow

WHEN = ("before", "under way", "answered")
"""Whether a message has not been sent, is worked on, or was answered when the trainer dies."""
BUCKETS = 3
FLAG = {"disk": "disk", "delta": "disk", "nixl": "nixl"}


@pytest.fixture(scope="module")
def server(checkpoints):
    server = Server(checkpoints[0], "--skip-tokenizer-init", "--dtype", "float32").wait_ready()
    yield server
    server.stop()


def send(rank: int, url: str, paths: list[str], flags: dict, dies_at: int | None, when: str) -> int:
    """Gives an engine the weights of each path, as versions up to 2; returns how many messages it sent.

    Args:
        dies_at: the number of the message at which the process is killed.
    """
    dist.init_process_group("gloo")
    update = WeightUpdate(run_config(run_args(**flags)), source := Source({}))
    request, numbers = EngineClient.request, itertools.count()

    def observed(self, method, path, *args, **options):
        dies = next(numbers) == dies_at
        if dies and when == "before":
            die()
        if dies and when == "under way":
            threading.Timer(0.002, die).start()
        try:
            return request(self, method, path, *args, **options)
        finally:
            if dies:
                die()

    EngineClient.request = observed
    for version, path in enumerate(paths, 3 - len(paths)):
        source.weights = load_file(f"{path}/model.safetensors")
        if version == 3 - len(paths):
            update.connect([EngineEndpoint(url, None, 1, 0 if flags["colocate"] else None)])
        update.run(version)
    sent = next(numbers)
    update.disconnect()
    return sent


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flags_of(transport: str, directory: Path, checkpoints: list[Path]) -> dict:
    return dict(
        distributed_timeout_minutes=1,
        rollout_external_engine_addrs=["127.0.0.1:1"],
        rollout_external=True,
        update_weight_buffer_size=1,
        colocate=transport == "handle",
        update_weight_transport=FLAG.get(transport, "nccl"),
        update_weight_mode="delta" if "delta" in transport else "full",
        update_weight_disk_dir=str(directory / "versions"),
        update_weight_local_checkpoint_dir=str(directory / "local") if transport == "delta" else None,
        synced_checkpoint=str(checkpoints[0]),
    )


@pytest.mark.parametrize(
    "transport",
    ["handle", "broadcast", "disk", "delta", "group delta", pytest.param("nixl", marks=needs_nixl)],
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 7])
def test_its_successor_gives_them_whole_weights(transport, every, server, checkpoints, said, tmp_path):
    """At each message of two updates, and in the short form at every seventh one."""
    _, first, second = map(str, checkpoints)
    flags = flags_of(transport, tmp_path, checkpoints)
    endpoint = EngineEndpoint(server.url, None, 1, None)
    whole = run_ranks(send, 1, server.url, [first, second], flags, None, "")[0]
    moments = list(itertools.product(range(whole), WHEN))
    assert whole >= 2 * 5
    for dies_at, when in moments[every - 1 :: every]:
        with pytest.raises(RuntimeError, match="rank 0 died"):
            run_ranks(send, 1, server.url, [first, second], flags, dies_at, when)
        probes = Probes(said)
        probes.send(server.url)
        engines = ExternalEngines([endpoint])
        engines.wait_ready([engines.launch(0, 0)], 60)
        server.post("/continue_generation")  # its owner sees that it does not answer
        probes.send(server.url)
        run_ranks(send, 1, server.url, [second], flags, None, "")
        version, found = probe(server.url, f"{dies_at} {when}")
        assert version == "2" and gap(found, said["2"]) < 1e-4, (dies_at, when)
        probes.require_whole()
