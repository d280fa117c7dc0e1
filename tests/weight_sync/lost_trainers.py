"""Trainers in processes of their own, which are lost at some step of what they send to an engine."""

import itertools
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.adapters.peft_format import tensor_name
from slime.backends.sglang_utils.client import EngineClient
from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement
from slime.weight_sync.update import AdapterWeights, WeightUpdate
from tests.run_args import run_args
from tests.weight_sync.disk_faults import Disk
from tests.weight_sync.test_messages import CHOICES, Source

RANK = 4
REPLACED = "has taken its place"
TAKES_BACK = "it takes the engine back"
FLAG = {"nixl": "nixl", **CHOICES}
Sent = list[tuple[int, str]]
"""Versions, and the checkpoints that they are."""


@dataclass(frozen=True)
class Loss:
    """The moment at which a trainer is lost, and how.

    Attributes:
        step: the number of the message, of what is done in the directory of versions, or of what trainer
            ranks tell each other: see `send`.
        when: "before" it, "under way", or "answered".
        how: "killed", "other rank" (which is killed while the first one speaks to the engine), or "stopped".
        note: where one that is stopped leaves its process id.
        rank: whose steps are counted, and who is killed.
    """

    step: int
    when: str
    how: str = "killed"
    note: str = ""
    rank: int = 0

    def come(self, pids: list[int]) -> None:
        if self.how == "stopped":
            Path(self.note).with_suffix(".part").write_text(str(os.getpid()))
            Path(self.note).with_suffix(".part").rename(self.note)
            # To this thread: another one might be told first, and this one send its message meanwhile.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            os.kill(pids[1 if self.how == "other rank" else self.rank], signal.SIGKILL)


class Files(Disk):
    """Calls a function before each thing that is done to files below a directory."""

    def __init__(self, folder: str, act) -> None:
        super().__init__(SimpleNamespace(setattr=setattr), folder)
        self._act = act

    def _may_fail(self, name, grows, path) -> None:
        self._act()


def flags_of(transport: str, directory: Path, served: Path) -> dict:
    adapters = {"lora_rank": RANK, "lora_merge": False} if transport == "adapters" else {}
    own = transport == "delta"  # engines of others are given changes by followers
    return adapters | dict(
        distributed_timeout_minutes=1,
        rollout_external_engine_addrs=None if own else ["127.0.0.1:1"],
        rollout_external=not own,
        update_weight_buffer_size=1,
        colocate=transport == "handle",
        update_weight_transport=FLAG.get(transport, "nccl"),
        update_weight_mode="delta" if "delta" in transport else "full",
        update_weight_disk_dir=str(directory / "versions"),
        update_weight_local_checkpoint_dir=str(directory / "local") if transport == "delta" else None,
        synced_checkpoint=str(served),
    )


def adapter_of(version: int) -> dict[str, torch.Tensor]:
    """A random adapter of the first layer's attention."""
    noise = torch.Generator().manual_seed(version)
    shapes = {("q_proj", "lora_A"): (RANK, 64), ("q_proj", "lora_B"): (128, RANK)}
    return {
        tensor_name(f"model.layers.0.self_attn.{layer}", part): 0.1 * torch.randn(shape, generator=noise)
        for (layer, part), shape in shapes.items()
    }


def send(
    rank: int,
    url: str,
    sent: Sent,
    flags: dict,
    loss: Loss | None,
    of_files: bool = False,
    tells: bool = False,
) -> int:
    """Gives an engine some versions; returns how many steps that took. Adapters are of the first base.

    Args:
        of_files: whether steps are what is done to files, in place of messages to the engine.
        tells: whether they are what ranks tell each other.
    """
    dist.init_process_group("gloo")
    config, source, adapter = run_config(run_args(**flags)), Source({}, sent[0][1]), Source({})
    has_adapter = config.lora.lora_rank > 0
    beside = [AdapterWeights(adapter, config.lora)] if has_adapter else []
    update = WeightUpdate(config, source, adapters=beside)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    steps, endpoints = itertools.count(), [EngineEndpoint(url, None, 1, 0 if flags["colocate"] else None)]
    if tells:
        _observe_ranks(steps, loss if loss is not None and loss.rank == rank else None, pids)
    elif rank == (0 if loss is None else loss.rank) or of_files:
        own = loss if loss is not None and loss.rank == rank else None
        _observe(steps, own, pids, flags["update_weight_disk_dir"] if of_files else None)
    try:
        for index, (version, path) in enumerate(sent):
            source.weights = load_file(f"{path}/model.safetensors")
            if has_adapter:
                adapter.weights = adapter_of(version)
                source.weights = load_file(f"{sent[0][1]}/model.safetensors")
            if not index:
                update.connect(endpoints)
            update.run(version)
        taken = next(steps)
        update.disconnect()
    except Exception as error:
        if loss is not None and loss.how == "stopped":
            _require_kept_out(update, endpoints, error)
        raise
    return taken


def _observe_ranks(steps, loss: Loss | None, pids: list[int]) -> None:
    """Counts what the ranks of a trainer tell each other."""
    exchange = RankAgreement._exchange

    def observed(self, *args):
        is_here = next(steps) == (loss and loss.step)
        if is_here and loss.when == "before":
            loss.come(pids)
        found = exchange(self, *args)
        if is_here:
            loss.come(pids)
        return found

    RankAgreement._exchange = observed


def _observe(steps, loss: Loss | None, pids: list[int], folder: str | None) -> None:
    if folder is not None:
        step = lambda: loss.come(pids) if next(steps) == (loss and loss.step) else None
        Files(folder, step)
        return
    request = EngineClient.request

    def observed(self, method, path, *args, **options):
        is_here = next(steps) == (loss and loss.step)
        if is_here and loss.when == "before":
            loss.come(pids)
        if is_here and loss.when == "under way":
            threading.Timer(0.002, loss.come, [pids]).start()
        try:
            return request(self, method, path, *args, **options)
        finally:  # an engine may have refused it, such as the end of an update that is not open
            if is_here and loss.when != "before":
                loss.come(pids)

    EngineClient.request = observed


def _require_kept_out(update: WeightUpdate, endpoints: list[EngineEndpoint], error: Exception) -> None:
    """Has it do what a run does after a failure, too: connect and begin again."""
    try:
        update.connect(endpoints)
    except Exception as again:
        if REPLACED not in str(again):
            raise
    else:
        raise AssertionError(TAKES_BACK) from error
