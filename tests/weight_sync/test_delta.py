"""Changes over a directory: what engines load is what the trainer has, bit for bit, or nothing new."""

import json
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.responses import JSONResponse
from safetensors.torch import load_file

from slime.config.run import run_config
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import delta, transports_of
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import MANIFEST, VersionManifest, directory_of
from tests.run_args import run_args
from tests.weight_sync.test_disk import group  # noqa: F401
from tests.weight_sync.test_handle import Recorder

FORMS = {
    "a": (torch.bfloat16, (64, 32)),
    "empty": (torch.float32, (0, 2)),
    "b": (torch.float32, (3,)),
    "c": (torch.float8_e4m3fn, (5, 5)),
}


class Source:
    """Tensors of random bytes, of which some change with each update."""

    ranks, rounding = frozenset({0}), 0.0

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.weights = {name: self._random(*form) for name, form in FORMS.items()}

    def _random(self, dtype, shape):
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.from_numpy(self.rng.integers(0, 256, count, dtype=np.uint8))
        return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    def train(self):
        """In place, as an optimizer does."""
        for tensor in self.weights.values():
            data = tensor.view(-1).view(torch.uint8)
            for at in self.rng.integers(
                0, max(1, data.numel()), self.rng.integers(0, 4) * bool(data.numel())
            ):
                data[at] ^= int(self.rng.integers(1, 256))

    def manifest(self):
        return [TensorInfo(name, shape, dtype) for name, (dtype, shape) in FORMS.items()]

    def buckets(self, max_bytes):
        for pair in self.weights.items():
            yield [pair]


class Puller(Recorder):
    """An engine that fetches with our reader, and loads what it is told to."""

    def __init__(self, local):
        super().__init__()
        self.local, self.loaded = local, {}
        self.answers |= {"pull_weights": self.pull, "update_weights_from_disk": self.load}

    def pull(self, body):
        assert body["local_checkpoint_dir"] == str(self.local.parent / "configured")
        try:
            path = pull(body["source_dir"], self.local, body["target_version"])
        except (ValueError, OSError) as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return {"success": True, "path": str(path)}

    def load(self, body):
        self.loaded = read(body["model_path"])
        self.weight_version = body["weight_version"]
        return {"success": True}


def read(path):
    files = sorted(Path(path).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def require_equal(found, weights):
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name


@pytest.fixture
def root(tmp_path):
    return tmp_path / "versions"


@pytest.fixture
def args(tmp_path, root):
    return args_of(tmp_path, root)


def args_of(tmp_path, root):
    assets = tmp_path / "served"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    return run_args(
        distributed_timeout_minutes=1,
        update_weight_buffer_size=64,
        update_weight_transport="disk",
        update_weight_mode="delta",
        update_weight_disk_dir=str(root),
        update_weight_local_checkpoint_dir=str(tmp_path / "configured"),
        synced_checkpoint=str(assets),
    )


@pytest.fixture
def engines(tmp_path):
    """A function that starts engines, each on a machine of its own."""
    with machines(tmp_path) as start:
        yield start


@contextmanager
def machines(tmp_path):
    started = []

    def start():
        engine = Puller(tmp_path / f"machine{len(started)}")
        started.append(engine.start())
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.stop()


class Trainer:
    def __init__(self, args, *engines):
        self.source = Source()
        self.update = WeightUpdate(run_config(args), self.source)
        self.engines = []
        self.connect(*engines)
        self.version = 0

    def connect(self, *engines):
        self.engines = list(engines)
        self.update.connect([EngineEndpoint(engine.url, None, 1, None) for engine in engines])

    def step(self):
        self.source.train()
        self.version += 1
        report = self.update.run(self.version)
        for engine in self.engines:
            require_equal(engine.loaded, self.source.weights)
            assert engine.weight_version == str(self.version)
        return report


@pytest.fixture
def trainer(args, engines):
    return Trainer(args, engines())


def kinds(root):
    """By version whether it is whole; those that cannot be read are left out."""
    found = {}
    for path in sorted(root.glob("weight_v*")):
        with suppress(ValueError):
            found[int(path.name[-6:])] = VersionManifest.read(path).base is None
    return found


def test_the_first_version_is_whole_and_those_after_it_hold_what_has_changed(trainer, root):
    whole = trainer.step()
    assert (whole.sent, whole.density) == (64 * 32 * 2 + 3 * 4 + 25, 0.0)
    trainer.source.weights["b"].view(torch.uint8)[5] ^= 1
    train, trainer.source.train = trainer.source.train, lambda: None
    report = trainer.step()
    trainer.source.train = train
    assert report.density == 1 / whole.sent and 0 < report.sent < 60
    assert kinds(root) == {1: True, 2: False}
    manifest = json.loads((root / "weight_v000002" / MANIFEST).read_bytes())
    assert [*manifest["tensors"]] == ["b"] and manifest["base"]["version"] == "1"
    index = json.loads((root / "weight_v000002" / "model.safetensors.index.json").read_bytes())
    told = {name: value for name, value in index["metadata"].items() if name != "total_size"}
    assert told == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }


def test_an_engine_stands_still_only_to_load(trainer):
    (engine,) = trainer.engines
    trainer.step()
    trainer.step()
    session = ["pull_weights", "pause_generation", "update_weights_from_disk"]
    assert engine.paths == [*session, "continue_generation"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_hundred_versions_reach_every_reader_or_none(args, engines, root, tmp_path, monkeypatch, encoding):
    """Links are lost and damaged, and what a reader has; another comes by now and then, and an engine joins
    at version 57. At times the last one refuses a version, whose number stands for other weights then.
    """
    monkeypatch.setattr(delta, "MAX_LINKS", 12)
    args.update_weight_delta_encoding = encoding
    rng = np.random.default_rng(3)
    first = engines()
    trainer = Trainer(args, first)
    outsider, whole, refused = tmp_path / "outsider", 0, 0
    for version in range(1, 101):
        if version == 57:
            trainer.connect(first, engines())
        if version % 9 == 0:
            _spoil(rng, root)
        if version % 14 == 0:
            shutil.rmtree(first.local)  # a machine of its engine that was started anew
        if version % 8 == 0 and version % 14:
            _spoil(rng, first.local)
        if version % 13 == 0:
            _refuse(trainer)
        trainer.step()
        whole += kinds(root)[version]
        if version % 3 == 0:  # two versions behind
            try:
                require_equal(read(pull(root, outsider, version)), trainer.source.weights)
            except ValueError as error:
                refused += 1
                assert str(root) in str(error)
    assert 5 < whole < 50 and refused < 15


def _refuse(trainer):
    """The last engine does not load what it has fetched."""
    engine = trainer.engines[-1]
    engine.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
    with pytest.raises(RuntimeError, match="/update_weights_from_disk: HTTP 400"):
        trainer.step()
    engine.answers["update_weights_from_disk"] = engine.load
    trainer.connect(*trainer.engines)
    trainer.version -= 1


def _spoil(rng, root):
    """Takes a version away, cuts a file off, or changes a bit of it."""
    path = directory_of(root, int(rng.choice([*kinds(root)])))
    file = rng.choice(sorted(path.iterdir()))
    match int(rng.integers(3)):
        case 0:
            shutil.rmtree(path)
        case 1:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case 2:
            data = bytearray(file.read_bytes())
            data[int(rng.integers(len(data)))] ^= 8
            file.write_bytes(data)


def test_a_version_comes_whole_where_a_reader_lacks_a_link_and_before_it_is_stopped(trainer, root, caplog):
    (engine,) = trainer.engines
    trainer.step()
    trainer.step()
    shutil.rmtree(engine.local)
    shutil.rmtree(root / "weight_v000001")
    before = len(engine.paths)
    trainer.step()
    assert engine.paths[before : before + 3] == ["pull_weights", "pull_weights", "pause_generation"]
    assert kinds(root) == {3: True}
    assert "version 3 comes whole: " in caplog.text and "builds on version 1" in caplog.text
    trainer.step()
    assert kinds(root) == {3: True, 4: False}


def test_a_machine_that_cannot_fetch_ends_the_update_by_name_and_no_engine_stops(trainer, root):
    (engine,) = trainer.engines
    trainer.step()
    engine.answers["pull_weights"] = JSONResponse({"message": "No space left"}, status_code=400)
    before = len(engine.paths)
    with pytest.raises(RuntimeError, match=r"/pull_weights: HTTP 400: .*No space left"):
        trainer.step()
    assert engine.paths[before:] == ["pull_weights"] * 2


def test_a_replaced_trainer_is_told_so_and_writes_no_whole_version(trainer, root):
    (engine,) = trainer.engines
    trainer.step()
    engine.answers["pull_weights"] = JSONResponse({"message": "taken"}, status_code=409)
    before = len(engine.paths)
    with pytest.raises(RuntimeError, match=r"/pull_weights: HTTP 409: .*taken"):
        trainer.step()
    assert engine.paths[before:] == ["pull_weights"] and kinds(root) == {1: True, 2: False}


def test_nothing_whole_is_written_for_an_engine_that_is_gone(trainer, root):
    trainer.step()
    trainer.engines[0].stop()
    with pytest.raises(RuntimeError, match="/pull_weights: no answer"):
        trainer.step()
    assert kinds(root) == {1: True, 2: False}


def test_a_trainer_in_whose_place_another_one_has_come_writes_nothing_more(args, engines, root):
    engine = engines()
    first, second = Trainer(args, engine), Trainer(args, engine)
    second.step()
    before = [*root.rglob("*")]
    with pytest.raises(RuntimeError, match=r"sends weights no more: .* has taken its place"):
        first.step()
    assert [*root.rglob("*")] == before and engine.weight_version == "1"
    second.step()


def test_changes_of_an_update_that_failed_are_not_taken_for_those_of_the_next(trainer, root):
    (engine,) = trainer.engines
    trainer.step()
    engine.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
    trainer.source.weights["b"].view(torch.uint8)[5] ^= 1
    train, trainer.source.train = trainer.source.train, lambda: None
    with pytest.raises(RuntimeError, match="/update_weights_from_disk: HTTP 400"):
        trainer.step()
    trainer.source.weights["b"].view(torch.uint8)[5] ^= 1
    engine.answers["update_weights_from_disk"] = engine.load
    trainer.connect(engine)
    trainer.step()
    assert VersionManifest.read(root / "weight_v000003").tensors == {}
    trainer.source.train = train
    trainer.step()
    assert kinds(root) == {1: True, 2: False, 3: False, 4: False}


def test_a_whole_version_that_is_refused_is_not_written_again(trainer):
    (engine,) = trainer.engines
    engine.answers["pull_weights"] = JSONResponse({"message": "No space left"}, status_code=400)
    with pytest.raises(RuntimeError, match="No space left"):
        trainer.step()
    assert engine.paths == ["pull_weights"]


def test_the_base_moves_on_only_when_every_engine_has_confirmed(args, engines, root):
    """One has loaded what the other one refused; the number is given again, to other weights."""
    first, second = engines(), engines()
    trainer = Trainer(args, first, second)
    trainer.step()
    second.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
    with pytest.raises(RuntimeError, match="/update_weights_from_disk: HTTP 400"):
        trainer.step()
    assert first.weight_version == "2" and second.weight_version == "1"
    second.answers["update_weights_from_disk"] = second.load
    trainer.connect(first, second)
    trainer.version = 1
    trainer.step()
    assert VersionManifest.read(root / "weight_v000002").base.version == 1


def test_a_run_that_goes_on_sends_a_whole_version_first(args, engines, root):
    engine = engines()
    first = Trainer(args, engine)
    for _ in range(3):
        first.step()
    (root / "weight_v000009").mkdir()
    second = Trainer(args, engine)
    second.version = 1
    second.step()
    assert kinds(root) == {2: True}
    second.step()
    assert kinds(root) == {2: True, 3: False}


def test_after_many_changes_a_whole_version_is_there_for_who_comes_late(trainer, root, monkeypatch):
    monkeypatch.setattr(delta, "MAX_LINKS", 3)
    for _ in range(5):
        trainer.step()
    assert kinds(root) == {4: True, 5: False}


def test_changes_as_large_as_the_weights_make_room_for_a_whole_version(trainer, root):
    trainer.step()
    for _ in range(2):
        trainer.source.weights |= Source(trainer.version).weights
        trainer.step()
    assert kinds(root)[3]
    trainer.step()
    assert not kinds(root)[4]


def test_a_changed_directory_of_versions_is_kept_if_it_is_wanted(args, engines, root, monkeypatch):
    monkeypatch.setattr(delta, "MAX_LINKS", 2)
    args.update_weight_disk_keep_files = True
    trainer = Trainer(args, engines())
    for _ in range(4):
        trainer.step()
    assert [*kinds(root)] == [1, 2, 3, 4]


def test_whole_versions_are_fetched_too_if_there_is_a_place_for_them(args, engines, root):
    args.update_weight_mode = "full"
    trainer = Trainer(args, engines())
    trainer.step()
    trainer.step()
    assert kinds(root) == {1: True, 2: True}
    assert (
        trainer.engines[0]
        .seen("update_weights_from_disk")[-1]["model_path"]
        .startswith(str(trainer.engines[0].local))
    )


def test_steps_that_change_nothing_leave_engines_what_they_load(trainer):
    """A step may be too small for the format; a machine makes no second copy of what it holds."""
    trainer.step()
    trainer.source.train = lambda: None
    for _ in range(3):
        trainer.step()
    assert trainer.engines[0].seen("update_weights_from_disk")[-1]["model_path"].endswith("weight_v000001")


def test_a_helper_beside_the_server_is_asked_where_there_is_one(args, engines):
    server, helper = engines(), engines()
    trainer = Trainer(args)
    trainer.update.connect([EngineEndpoint(server.url, None, 1, None, puller=helper.url)])
    trainer.update.run(1)
    assert helper.paths == ["pull_weights"] and "pull_weights" not in server.paths
    require_equal(server.loaded, trainer.source.weights)


def test_only_a_run_that_sends_changes_keeps_weights_in_memory(args):
    assert [type(each).__name__ for each in transports_of(run_config(args))] == ["DeltaTransport"]
    args.update_weight_mode = "full"
    assert [type(each).__name__ for each in transports_of(run_config(args))] == ["DiskTransport"]
