"""Changes over a folder that a URL names: engines load what the trainer has, bit for bit, or nothing new."""

import uuid

import numpy as np
import pytest

from slime.weight_sync.transports import delta
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import MANIFEST, VersionManifest
from slime.weight_sync.versions.remote import Store
from tests.weight_sync.test_delta import Trainer, args, engines, read, require_equal, root
from tests.weight_sync.test_disk import group

__all__ = ["args", "engines", "group", "root"]  # fixtures


@pytest.fixture(params=["file", "memory"])
def url(request, args, tmp_path):
    url = f"file://{tmp_path}/store/run" if request.param == "file" else f"memory://{uuid.uuid4().hex}/run"
    args.update_weight_disk_dir = url
    return url


def own(url):
    """The folder of the trainer that came last."""
    return Store(f"{url}/{Store(url).names()[-1]}")


def kinds(store):
    """By version whether it is whole."""
    names = [name for name in store.names() if name.startswith("weight_v")]
    found = {name: VersionManifest.parse(store.get(f"{name}/{MANIFEST}"), name) for name in names}
    return {int(name[-6:]): manifest.base is None for name, manifest in found.items()}


def spoil(rng, store):
    """Takes a file of a version away, cuts it off, or changes a bit of it."""
    versions = [name for name in store.names() if name.startswith("weight_v")]
    version = rng.choice(versions)
    path = f"{version}/{rng.choice(store.names(version))}"
    data = bytearray(store.get(path))
    match int(rng.integers(3)):
        case 0:
            store.remove(path)
        case 1:
            store.put(path, [bytes(data[: len(data) // 2])])
        case 2:
            data[int(rng.integers(len(data)))] ^= 8
            store.put(path, [bytes(data)])


def note_version(args, version_dir, rollout_engines):
    """A user's function."""
    args.written.append(version_dir)


@pytest.mark.slow
def test_versions_reach_every_reader_or_none(url, args, engines, tmp_path, monkeypatch):
    """Files are lost and damaged, a reader comes by now and then, and an engine joins at version 23."""
    monkeypatch.setattr(delta, "MAX_LINKS", 12)
    rng = np.random.default_rng(4)
    first = engines()
    trainer = Trainer(args, first)
    outsider, read_well = tmp_path / "outsider", 0
    for version in range(1, 41):
        if version == 23:
            trainer.connect(first, engines())
        if version % 5 == 0:
            spoil(rng, own(url))
        trainer.step()
        if version % 3 == 0:  # two versions behind
            try:
                require_equal(read(pull(own(url).url, outsider, version)), trainer.source.weights)
                read_well += 1
            except ValueError as error:
                assert url in str(error)
    assert read_well


def test_changes_go_through_and_old_versions_go(url, args, engines, monkeypatch):
    monkeypatch.setattr(delta, "MAX_LINKS", 3)
    engine = engines()
    trainer = Trainer(args, engine)
    for _ in range(5):
        trainer.step()
    assert kinds(own(url)) == {4: True, 5: False}
    sent = engine.seen("pull_weights")[-1]
    assert sent["source_dir"] == own(url).url


def test_whole_versions_go_through_too(url, args, engines):
    args.update_weight_mode = "full"
    args.custom_update_weight_post_write_path = f"{__name__}.note_version"
    args.written = []
    trainer = Trainer(args, engines())
    trainer.step()
    trainer.step()
    assert kinds(own(url)) == {1: True, 2: True}
    assert args.written == [f"{own(url).url}/weight_v00000{version}" for version in (1, 2)]


def test_a_version_comes_whole_where_a_link_is_lost_and_before_an_engine_is_stopped(
    url, args, engines, caplog
):
    engine = engines()
    trainer = Trainer(args, engine)
    trainer.step()
    trainer.step()
    (engine.local / "weight_v000002" / "model-00001.safetensors").unlink()
    (engine.local / "weight_v000001" / "model-00001.safetensors").unlink()
    own(url).remove(f"weight_v000001/{MANIFEST}")
    before = len(engine.paths)
    trainer.step()
    assert engine.paths[before : before + 3] == ["pull_weights", "pull_weights", "pause_generation"]
    assert "version 3 comes whole: " in caplog.text and "builds on version 1" in caplog.text


@pytest.mark.parametrize("stage", ["model-00001.safetensors", "model.safetensors.index.json", MANIFEST])
def test_a_store_that_takes_nothing_more_ends_the_update_by_name_and_no_engine_is_stopped(
    url, args, engines, monkeypatch, stage
):
    engine = engines()
    trainer = Trainer(args, engine)
    trainer.step()
    before, put = len(engine.paths), Store.put

    def fill(self, path, pieces):
        if path.endswith(stage):
            raise OSError(f"{self.url}/{path}: no room")
        put(self, path, pieces)

    with (
        monkeypatch.context() as broken,
        pytest.raises(RuntimeError, match=f"{url}: .*{stage}: no room") as e,
    ):
        broken.setattr(Store, "put", fill)
        trainer.step()
    assert str(e.value).startswith("--update-weight-disk-dir ") and len(engine.paths) == before
    assert kinds(own(url)) == {1: True}
    again = Trainer(args, engine)
    again.version = 1
    again.step()
    assert kinds(own(url)) == {2: True} and len(Store(url).names()) == 1


def test_a_trainer_in_whose_place_another_one_has_come_writes_nothing_more(url, args, engines):
    engine = engines()
    first, second = Trainer(args, engine), Trainer(args, engine)
    second.step()
    names = Store(url).names()
    before = {name: Store(url).names(name) for name in names}
    assert len(names) == 1  # the first one's went when the second one's version was confirmed
    with pytest.raises(RuntimeError, match=r"sends weights no more: .* has taken its place"):
        first.step()
    assert {name: Store(url).names(name) for name in Store(url).names()} == before
    second.step()
