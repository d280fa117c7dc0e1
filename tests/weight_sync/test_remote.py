"""Versions in a folder that a URL names: the right weights, or an error by name, come what may."""

import sys
import threading
import uuid
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from slime.utils.stores import bad_url, shown
from slime.weight_sync.versions import remote, source
from slime.weight_sync.versions.folder import Folder
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import MANIFEST, directory_of
from slime.weight_sync.versions.owner import DirectoryTaken
from slime.weight_sync.versions.remote import Remote, Store
from slime.weight_sync.versions.staged import StagedVersion
from slime.weight_sync.versions.storage import storage_of
from tests.weight_sync.publisher import Publisher, require_equal

OLD, NEW = "here:1:old", "here:2:new"


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    """The URL of a folder that is not there yet."""
    return f"file://{tmp_path}/store/run" if request.param == "file" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def store(url):
    return Store(url)


@pytest.fixture
def published(url, tmp_path):
    """A publisher into the folder, whose name readers are told."""
    place = Remote(url)
    place.take(OLD)
    (tmp_path / "shared").mkdir()
    publisher = Publisher(tmp_path / "shared", place=place)
    publisher.source = place.source
    return publisher


@pytest.fixture
def fast(monkeypatch):
    """Nobody waits before another attempt."""
    waits = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=waits.append))
    return waits


def failing(monkeypatch, files, method, error, times):
    """Has a method of a file system fail so many times; returns the paths that it was called with."""
    called, act, left = [], getattr(files, method), [error] * times

    def fail(path, *args, **options):
        called.append(path)
        with suppress(IndexError):  # threads may be in here at once
            raise left.pop()
        return act(path, *args, **options)

    monkeypatch.setattr(files, method, fail)
    return called


def whole_versions(local):
    return sorted(path.name for path in local.iterdir() if path.is_dir())


def test_a_place_is_a_directory_or_a_url(url, tmp_path):
    assert isinstance(storage_of(str(tmp_path)), Folder) and isinstance(storage_of(url), Remote)
    assert str(storage_of(url + "/")) == url


def test_a_reader_makes_each_version_whatever_it_has(published, local):
    """The one before, one of long ago, or nothing: then from the newest whole one."""
    published.publish(9, whole=(1, 6))
    for version in (1, 2, 4, 5, 9):
        path = pull(published.source, local, version)
        assert path == directory_of(local, version)
        require_equal(path, published.kept[version])
        assert (path / "config.json").read_text() == "{}"
    assert sorted(path.name for path in local.iterdir()) == [".lock", "weight_v000009"]


def test_who_comes_late_needs_room_for_two_versions_only(published, local, monkeypatch):
    """What it had goes before changes are made of a whole version that was fetched."""
    published.publish(1)
    pull(published.source, local, 1)
    published.publish(3, whole=(3,))
    seen, write = [], StagedVersion.write
    monkeypatch.setattr(
        StagedVersion, "write", lambda self, bucket: (seen.append(whole_versions(local)), write(self, bucket))
    )
    require_equal(pull(published.source, local, 4), published.kept[4])
    assert set(map(tuple, seen)) == {(".fetched", ".weight_v000004.partial", "weight_v000003")}
    assert whole_versions(local) == ["weight_v000003", "weight_v000004"]


def test_what_an_engine_has_stays_beside_a_whole_version_that_is_fetched(published, local):
    """It may refuse that; a version of the same number and other weights goes."""
    published.publish(2, whole=(1, 2))
    for version in (1, 2):
        pull(published.source, local, version, kept=[1])
    assert whole_versions(local) == ["weight_v000001", "weight_v000002"]
    require_equal(directory_of(local, 1), published.kept[1])
    published.version, published.manifest = 1, None
    published.train()
    published.whole()
    require_equal(pull(published.source, local, 2, kept=[1, 2]), published.kept[2])


def test_a_whole_version_is_fetched_as_it_is_and_a_change_of_nothing_too(published, local, monkeypatch):
    published.publish(1)
    published.changes()
    monkeypatch.setattr(StagedVersion, "write", None)
    require_equal(pull(published.source, local, 2), published.kept[1])


def test_no_file_of_a_version_can_be_missing_cut_off_or_damaged_unseen(published, store, local, tmp_path):
    published.publish(2)
    trainer = published.source.removeprefix(store.url + "/")
    refused = 0
    for version in ("weight_v000001", "weight_v000002"):
        for name in store.names(f"{trainer}/{version}"):
            path = f"{trainer}/{version}/{name}"
            whole = store.get(path)
            flipped = bytearray(whole)
            flipped[len(whole) // 2] ^= 4
            for number, damaged in enumerate((None, whole[:-3], b"", bytes(flipped))):
                store.remove(path) if damaged is None else store.put(path, [damaged])
                here = tmp_path / f"{version}-{name}-{number}"
                try:
                    require_equal(pull(published.source, here, 2), published.kept[2])
                except ValueError as error:
                    refused += 1
                    assert store.url in str(error) and "weight_v00000" in str(error)
                    assert not directory_of(here, 2).exists()
                store.put(path, [whole])
    assert refused > 30
    require_equal(pull(published.source, local, 2), published.kept[2])
    assert ".fetched" not in whole_versions(local)


def test_a_whole_version_that_is_damaged_is_not_loaded(published, store, local):
    """It is fetched as it is, so nothing that is made of it would be found to be another."""
    published.publish(1)
    path = f"{published.source.removeprefix(store.url + '/')}/weight_v000001/model-00001.safetensors"
    data = bytearray(store.get(path))
    data[-1] ^= 4
    store.put(path, [bytes(data)])
    with pytest.raises(ValueError, match=r"weight_v000001: wide: xxh3-128 \w+ is read"):
        pull(published.source, local, 1)
    assert whole_versions(local) == []


def test_a_damaged_copy_of_its_own_is_made_anew(published, local):
    published.publish(3)
    for version in (2, 3):
        file = pull(published.source, local, 2) / "model-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        require_equal(pull(published.source, local, version), published.kept[version])


def test_a_version_without_its_manifest_is_none(published, store, local):
    published.publish(1)
    store.remove(f"{published.source.removeprefix(store.url)}/weight_v000001/{MANIFEST}".lstrip("/"))
    said = f"^{published.source}/weight_v000001: is no version of weights"
    with pytest.raises(ValueError, match=said):
        pull(published.source, local, 1)


def test_the_manifest_comes_last_and_goes_first(published, monkeypatch):
    published.publish(1)
    done = []
    for name in ("put", "remove"):
        act = getattr(Store, name)
        monkeypatch.setattr(
            Store, name, lambda self, path, *rest, act=act, name=name: (
                done.append((name, path.rpartition("/")[2])), act(self, path, *rest)
            )
        )  # fmt: skip
    published.version = 0
    published.whole()
    assert done[:2] == [("remove", MANIFEST), ("remove", "weight_v000001")]
    assert done[-1] == ("put", MANIFEST) and {name for name, _ in done[2:]} == {"put"}
    published.place.remove_others({7})
    assert done[-2:] == [("remove", MANIFEST), ("remove", "weight_v000001")]


def test_a_version_that_fails_leaves_nothing(published, store, monkeypatch):
    published.publish(1)
    staged = StagedVersion(published.place, 2)
    staged.write([("a", torch.ones(2))])
    put = Store.put

    def fill(self, path, pieces):
        if path.endswith(MANIFEST):
            raise OSError("no room")
        put(self, path, pieces)

    monkeypatch.setattr(Store, "put", fill)
    with pytest.raises(OSError, match="no room"):
        staged.publish(published.assets)
    assert store.names(published.source.removeprefix(store.url + "/")) == [".here", "weight_v000001"]


@pytest.mark.parametrize("method", ["get_file", "cat_file", "ls", "open"])
def test_what_fails_now_and_then_is_tried_again(published, local, monkeypatch, fast, method):
    files = published.place._store._files
    calls = failing(monkeypatch, files, method, ConnectionError("reset"), 3)
    monkeypatch.setattr(remote, "opened", lambda url: (files, files._strip_protocol(url)))
    published.publish(2)
    require_equal(pull(published.source, local, 2), published.kept[2])
    # Several files are fetched at once.
    assert len(calls) > 3 and len(fast) == 3 and (method == "get_file" or fast == [0.2, 1.0, 5.0])


@pytest.mark.parametrize(
    ("error", "attempts"), [(OSError("full"), 4), (RuntimeError("odd"), 4), (PermissionError("no"), 1)]
)
def test_what_goes_on_failing_is_named(published, local, monkeypatch, fast, error, attempts):
    published.publish(1)
    files = published.place._store._files
    monkeypatch.setattr(remote, "opened", lambda url: (files, files._strip_protocol(url)))
    calls = failing(monkeypatch, files, "cat_file", error, 99)
    with pytest.raises(OSError, match=rf"weight_v000001/manifest.json: {type(error).__name__}: {error}"):
        pull(published.source, local, 1)
    assert len(calls) == attempts and len(fast) == attempts - 1


def test_what_does_not_answer_is_named_in_time(published, local, monkeypatch):
    published.publish(1)
    files = published.place._store._files
    hold = threading.Event()
    monkeypatch.setattr(files, "get_file", lambda *args, **options: hold.wait(300))
    monkeypatch.setattr(remote, "opened", lambda url: (files, files._strip_protocol(url)))
    slow = source.source_of(published.source, local, limit_s=0.1)
    try:
        with pytest.raises(OSError, match=r"weight_v000001/\S+: TimeoutError: access to .* after 0.1 s"):
            slow.fetched(slow.version(1))
    finally:
        hold.set()


def test_a_folder_is_that_of_who_came_last(url, store, tmp_path):
    first, second = Remote(url), Remote(url)
    for _ in range(2):
        first.take(OLD)
        first.require(OLD)
    second.take(NEW)
    second.require(NEW)
    for act in (first.take, first.require):
        with pytest.raises(DirectoryTaken, match=f"disk-dir {url}: {OLD} sends weights no more: here-2-new"):
            act(OLD)
    assert store.names() == ["trainer_000001_here-1-old", "trainer_000002_here-2-new"]


def test_of_two_that_come_at_once_both_see_the_same_one_last(url, store):
    first, second = Remote(url), Remote(url)
    first.take(OLD)
    store.put("trainer_000001_here-2-new/.here", [b""])  # it has seen nobody either
    second.take(NEW)
    with pytest.raises(DirectoryTaken, match="here-2-new has taken its place"):
        first.require(OLD)


def test_a_folder_that_somebody_has_removed_is_taken_again(url, store):
    place = Remote(url)
    place.require(OLD)
    store.remove("")
    place.require(OLD)
    assert store.names() == ["trainer_000001_here-1-old"]


def test_who_was_replaced_changes_nothing_that_is_read_and_goes_with_the_next_version(
    url, published, store, local, tmp_path
):
    """Nor does it if it does not look, as one that was stopped between its look and its write."""
    published.publish(1)
    place = Remote(url)
    place.take(NEW)
    (tmp_path / "next").mkdir()
    successor = Publisher(tmp_path / "next", place=place)
    successor.rng = published.rng
    successor.publish(1)
    published.version = 0
    published.whole()
    require_equal(pull(place.source, local, 1), successor.kept[1])
    store.put("notes/mine", [b"kept"])
    place.remove_others({1})
    assert store.names() == ["notes", "trainer_000002_here-2-new"]
    assert store.names("trainer_000002_here-2-new") == [".here", "weight_v000001"]
    published.place.remove_others({1})
    require_equal(pull(place.source, tmp_path / "again", 1), successor.kept[1])


def test_how_fast_it_is_is_measured_with_a_file_that_is_not_kept(url, store):
    place = Remote(url)
    place.take(OLD)
    assert 0 < place.speed(1000) < float("inf")
    assert store.names("trainer_000001_here-1-old") == [".here"]


@pytest.mark.parametrize("url", ["s3://bucket/run7", "s3a://bucket/run7/", "file:///shared/run7"])
def test_urls_of_folders_are_accepted(url):
    assert bad_url(url) is None and shown(url) == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://user:secret@bucket/run7", "has a user or a password in it"),
        ("s3://key:secret/more@bucket/run7", "has a user or a password in it"),
        ("s3://key:secret", "has a user or a password in it"),
        ("s3://bucket/run7?token=secret", "has a query in it"),
        ("s3://bucket/run7#secret", "has a query in it"),
        ("simplecache::s3://bucket/secret", "has another URL in it"),
        ("simplecache://s3://bucket/secret", "has another URL in it"),
        ("://run7", "is no URL of a folder"),
        ("s3://", "is no URL of a folder"),
        ("s3://bucket//run7", "is no URL of a folder"),
        ("memory://run7", "is the memory of one process"),
        ("gs://bucket/run7", "what opens it is not installed (Please install gcsfs"),
        ("nowhere://bucket/run7", "fsspec has nothing that opens nowhere://"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_and_no_secret_is_shown(url, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert bad_url(url).startswith(said)
    assert "secret" not in bad_url(url) + shown(url)
