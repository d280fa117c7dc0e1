"""Versions of weights in a directory: whole or not there, and kept until engines have the next."""

import errno
import json
import os
import shutil
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fastapi.responses import JSONResponse, StreamingResponse
from safetensors.torch import load_file

from slime.config.run import run_config
from slime.models.checkpoint.safetensors_index import INDEX
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync import update as weight_update
from slime.weight_sync.agreement import RankAgreement
from slime.weight_sync.report import SyncReport, of_all_ranks
from slime.weight_sync.transports import session, transports_of
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions import folder
from slime.weight_sync.versions.manifest import MANIFEST
from slime.weight_sync.versions.owner import WRITERS, DirectoryTaken, take_directory
from slime.weight_sync.versions.staged import StagedVersion
from slime.weight_sync.writer import new_writer
from tests.run_args import run_args
from tests.weight_sync.test_handle import Recorder

NAMES = ("a", "b", "c")


class Source:
    """Three tensors, a bucket each, whose values are the number of the update."""

    ranks, rounding = frozenset({0}), 0.0
    value = 1.0

    def manifest(self):
        return [TensorInfo(name, (4, 2), torch.float32) for name in NAMES]

    def buckets(self, max_bytes):
        for name in NAMES:
            yield [(name, torch.full((4, 2), self.value))]


class Reader(Recorder):
    """An engine that notes what is in the directory when it is asked to stop, and to load."""

    def __init__(self, root):
        super().__init__()
        self.root, self.seen_then, self.loaded = root, [], {}
        self.answers["pause_generation"] = self.look
        self.answers["update_weights_from_disk"] = self.load

    def look(self, body):
        self.seen_then.append(versions(self.root))
        return {"success": True}

    def load(self, body):
        files = sorted(os.scandir(body["model_path"]), key=lambda file: file.name)
        weights = [load_file(file.path) for file in files if file.name.endswith(".safetensors")]
        self.loaded[body["weight_version"]] = {name: t for each in weights for name, t in each.items()}
        return {"success": True}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs" / "versions"


@pytest.fixture
def args(tmp_path, root):
    assets = tmp_path / "served"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    (assets / "model.safetensors").write_bytes(b"weights of long ago")
    return run_args(
        distributed_timeout_minutes=1,
        update_weight_buffer_size=1,
        update_weight_transport="disk",
        update_weight_disk_dir=str(root),
        synced_checkpoint=str(assets),
    )


@pytest.fixture
def engine(root):
    engine = Reader(root)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def connected(args, engine):
    """A function that gives an update of a source to the engine, and the source."""

    def connect():
        source = Source()
        update = WeightUpdate(run_config(args), source)
        update.connect([EngineEndpoint(engine.url, None, 1, None)])
        return update, source

    return connect


def note_version(args, version_dir, rollout_engines):
    """A user's function."""
    seen = args.written_then
    seen.append((os.path.basename(version_dir), sorted(os.listdir(version_dir)), rollout_engines))
    if len(seen) == 3:
        raise OSError("the store is full")


def versions(root):
    return sorted(path.name for path in root.iterdir() if path.name != WRITERS)


def test_a_users_function_is_called_before_engines_read_a_version(args, connected, engine):
    args.custom_update_weight_post_write_path = f"{__name__}.note_version"
    args.written_then = seen = []
    update, _ = connected()
    update.run(1)
    update.run(2)
    with pytest.raises(OSError, match="the store is full"):
        update.run(3)
    assert [name for name, *_ in seen] == [f"weight_v{number:06d}" for number in (1, 2, 3)]
    assert all({"config.json", INDEX, MANIFEST} < {*files} for _, files, _ in seen)
    assert all([one.url for one in engines] == [engine.url] for *_, engines in seen)
    assert [*engine.loaded] == ["1", "2"] and len(engine.seen_then) == 2  # it was not even stopped


def test_an_engine_stands_still_only_to_load_a_version_that_is_complete(connected, engine, root):
    update, source = connected()
    assert update.run(1).sent == 3 * 32
    source.value = 2.0
    update.run(2)
    session = ["pause_generation", "update_weights_from_disk", "continue_generation"]
    assert engine.paths == session * 2
    # The old version is there until the engine has the new one.
    assert engine.seen_then == [["weight_v000001"], ["weight_v000001", "weight_v000002"]]
    assert versions(root) == ["weight_v000001", "weight_v000002"]
    for version, value in (("1", 1.0), ("2", 2.0)):
        weights = engine.loaded[version]
        assert sorted(weights) == [*NAMES] and all((t == value).all() for t in weights.values())
    manifest = json.loads((root / "weight_v000002" / MANIFEST).read_bytes())
    entry = manifest["tensors"]["b"]
    assert manifest["version"] == "2" and [*manifest["tensors"]] == [*NAMES]
    assert (entry["shape"], entry["dtype"], entry["file"]) == ([4, 2], "float32", "model-00002.safetensors")
    assert (root / "weight_v000002" / "config.json").read_text() == "{}"
    index = json.loads((root / "weight_v000002" / INDEX).read_bytes())
    assert index["metadata"] == {"total_size": 3 * 32} and [*index["weight_map"]] == [*NAMES]


class Clock:
    """Time that passes only where a test says so."""

    now = 50.0

    def __call__(self):
        return self.now

    def passes(self, seconds, function):
        def slow(*args):
            self.now += seconds
            return function(*args)

        return slow


def test_a_slow_disk_stops_engines_no_longer_than_they_load(connected, engine, monkeypatch):
    clock = Clock()
    for module in (session, weight_update):
        monkeypatch.setattr(module, "monotonic", clock)
    writing = StagedVersion.write
    monkeypatch.setattr(StagedVersion, "write", clock.passes(100.0, writing))
    engine.answers["update_weights_from_disk"] = clock.passes(1.0, engine.load)
    monkeypatch.setattr(folder, "disk_speed", lambda nbytes, directory: 48.0)
    update, _ = connected()
    assert update.run(1) == SyncReport(sent=3 * 32, transfer=300.0, pause=1.0, floor=2.0)


def test_a_directory_that_somebody_has_removed_is_made_again(connected, root):
    update, _ = connected()
    update.run(1)
    shutil.rmtree(root.parent)
    update.run(2)
    assert versions(root) == ["weight_v000002"]


def test_without_an_engine_nothing_is_gathered_and_nothing_stands_still(args, root, monkeypatch):
    source = Source()
    update = WeightUpdate(run_config(args), source)
    update.connect([])
    monkeypatch.delattr(Source, "buckets")
    report = update.run(1)
    assert report == SyncReport(transfer=report.transfer) and 0 <= report.transfer < 60
    assert not root.exists()


def test_a_rank_without_an_engine_writes_nothing(args, root):
    for mode in ("full", "delta"):
        args.update_weight_mode = mode
        (transport,) = transports_of(run_config(args))
        transport.agreement = RankAgreement(timedelta(minutes=1))
        transport.connect([])
        transport.open("1", None)
        assert transport.send([("a", torch.ones(2))], True) == 0
        transport.commit()
        transport.resume()
    assert not root.exists()


def test_ranks_send_side_by_side_and_the_slowest_counts():
    reports = [SyncReport(3, 1.0, 0.5, 0.1, 0.4, 0.7, 0.3), SyncReport(4, 3.0, 0.25, 0.2, 0.3, 0.8, 0.4)]
    assert of_all_ranks(reports) == SyncReport(7, 3.0, 0.5, 0.2, 0.4, 0.8, 0.4)
    assert of_all_ranks([]) == SyncReport(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_versions_are_kept_if_they_are_wanted(connected, args, root):
    args.update_weight_disk_keep_files = True
    update, _ = connected()
    update.run(1)
    update.run(2)
    assert versions(root) == ["weight_v000001", "weight_v000002"]


def test_a_version_that_an_engine_refuses_is_not_served_and_the_last_one_stays(connected, engine, root):
    update, _ = connected()
    update.run(1)
    engine.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
    with pytest.raises(RuntimeError, match="/update_weights_from_disk: HTTP 400"):
        update.run(2)
    assert engine.paths[-1] == "update_weights_from_disk"
    assert "weight_v000001" in versions(root)


def test_an_engine_that_cannot_flush_does_not_go_on(connected, engine):
    update, _ = connected()
    engine.answers["flush_cache"] = JSONResponse({}, status_code=500)
    with pytest.raises(RuntimeError, match="/flush_cache: HTTP 500"):
        update.run(1)
    assert engine.paths[-1] == "update_weights_from_disk"


def test_what_a_failure_has_left_is_not_written_for_engines_that_come_later(connected, engine):
    update, _ = connected()
    engine.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
    with pytest.raises(RuntimeError, match="/update_weights_from_disk: HTTP 400"):
        update.run(1)
    update.connect([])
    assert update.run(2).sent == 0


def _write_and_die(root):
    staged = StagedVersion(root, 3)
    staged.write([("a", torch.ones(4, 2))])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_version(connected, engine, root):
    child = os.fork()
    if not child:
        _write_and_die(root)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert versions(root) == [".weight_v000003.partial"]
    update, _ = connected()
    update.run(3)
    assert versions(root) == ["weight_v000003"] and sorted(engine.loaded["3"]) == [*NAMES]


def test_whoever_took_the_directory_within_a_write_is_named_and_not_the_files_that_went(
    connected, root, monkeypatch
):
    update, _ = connected()

    def take(version, bucket):
        take_directory(root, new_writer())
        shutil.rmtree(root / ".weight_v000001.partial")
        return write(version, bucket)

    write = StagedVersion.write
    monkeypatch.setattr(StagedVersion, "write", take)
    with pytest.raises(DirectoryTaken, match="has taken its place"):
        update.run(1)


def test_what_runs_left_that_were_killed_goes_and_nothing_else(connected, root):
    """One of them had gone further than the checkpoint from which this run goes on."""
    for name in (".weight_v000002.partial", "weight_v000001", "weight_v000009", "notes"):
        (root / name).mkdir(parents=True)
    update, _ = connected()
    update.run(3)
    assert versions(root) == ["notes", "weight_v000003"]


def test_a_version_takes_the_place_of_the_one_before_the_last(connected, engine, root):
    """Before it is written: no third one needs room."""
    update, _ = connected()
    for version in (1, 2, 3, 4):
        update.run(version)
    assert engine.seen_then[-1] == versions(root) == ["weight_v000003", "weight_v000004"]


def test_a_full_disk_ends_the_update_by_name_and_no_engine_is_stopped(connected, engine, monkeypatch, root):
    write = os.pwrite

    def fill(descriptor, data, at):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("model-00002.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    update, _ = connected()
    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(RuntimeError, match=f"--update-weight-disk-dir {root}: .*No space left on device"):
        update.run(1)
    assert engine.paths == [] and versions(root) == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (folder, "remove_others")],
    ids=["begun", "described", "named", "others removed"],
)
def test_a_disk_that_turns_read_only_ends_the_update_by_name_at_each_stage(
    connected, engine, monkeypatch, root, owner, name
):
    """No engine goes on with half of it, and a run that takes over gets through."""

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    update, _ = connected()
    update.run(1)
    before = len(engine.paths)
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match=f"{root}: .*Read-only") as said:
        broken.setattr(owner, name, refuse)
        update.run(2)
    assert "--update-weight-disk-dir" in str(said.value)
    assert engine.paths[before:] == []
    assert "weight_v000001" in versions(root)
    again, source = connected()
    source.value = 2.0
    again.run(2)
    assert all((engine.loaded["2"][name] == 2.0).all() for name in NAMES)
    assert engine.paths[-1] == "continue_generation" and versions(root) == ["weight_v000002"]


def test_a_directory_that_cannot_be_written_is_named_before_the_first_update(connected, args):
    args.update_weight_disk_dir = "/proc/versions"
    with pytest.raises(RuntimeError, match="--update-weight-disk-dir /proc/versions: "):
        connected()


def test_a_byte_that_the_disk_changes_names_the_tensor_before_an_engine_stops(
    connected, engine, monkeypatch, root
):
    write = os.pwrite

    def damage(descriptor, data, at):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        damaged = name.endswith("model-00003.safetensors") and at
        return write(descriptor, bytes([data[0] ^ 1, *data[1:]]) if damaged else data, at)

    update, _ = connected()
    monkeypatch.setattr(os, "pwrite", damage)
    with pytest.raises(ValueError, match=r"c: xxh3-128 \w+ is read"):
        update.run(1)
    assert engine.paths == [] and versions(root) == []


def test_only_the_transport_that_flags_ask_for_is_used(args):
    assert _transports(args) == ["DiskTransport"]
    args.update_weight_transport, args.colocate = "nccl", True
    assert _transports(args) == ["HandleTransport", "BroadcastTransport"]
    args.colocate = False
    assert _transports(args) == ["BroadcastTransport"]


def _transports(args):
    return [type(each).__name__ for each in transports_of(run_config(args))]


def test_a_disk_that_hangs_ends_the_update_by_name_and_no_engine_is_stopped(
    connected, engine, monkeypatch, root
):
    write, hold = os.pwrite, threading.Event()

    def hang(descriptor, data, at):
        hold.wait(300)
        return write(descriptor, data, at)

    update, source = connected()
    update.run(1)
    before = len(engine.paths)
    (transport,) = update._transports
    with monkeypatch.context() as broken:
        broken.setattr(transport, "_timeout", timedelta(seconds=0.2))
        broken.setattr(os, "pwrite", hang)
        said = f"--update-weight-disk-dir {root}: .* has not ended after 0.2 s"
        with pytest.raises(RuntimeError, match=said):
            update.run(2)
        hold.set()
    assert len(engine.paths) == before
    again, source = connected()
    source.value = 2.0
    again.run(2)
    assert (engine.loaded["2"]["a"] == 2.0).all()


def test_an_engine_that_dies_while_it_loads_is_named_and_its_successor_gets_the_version(
    connected, engine, root
):
    async def broken_off():
        raise ConnectionError("the engine is gone")
        yield b""

    update, source = connected()
    update.run(1)
    engine.answers["update_weights_from_disk"] = lambda body: StreamingResponse(broken_off())
    source.value = 2.0
    with pytest.raises(RuntimeError, match=f"engine {engine.url}: /update_weights_from_disk: no answer"):
        update.run(2)
    assert engine.paths[-1] == "update_weights_from_disk" and "weight_v000001" in versions(root)
    successor = Reader(root)
    successor.start()
    try:
        update.connect([EngineEndpoint(successor.url, None, 1, None)])
        update.run(2)
        assert (successor.loaded["2"]["a"] == 2.0).all()
        assert versions(root) == ["weight_v000001", "weight_v000002"]
    finally:
        successor.stop()
