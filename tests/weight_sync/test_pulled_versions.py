"""Where the limits of a reader are: sizes of changes, what is a version, the wait for another reader."""

import fcntl
import json
import shutil
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from slime.models.checkpoint.safetensors_index import INDEX
from slime.weight_sync.versions.codec import apply, bytes_in, checksum, difference
from slime.weight_sync.versions.folder import remove_others
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import MANIFEST, state_of, version_of
from slime.weight_sync.versions.manifest import VersionManifest as Manifest
from slime.weight_sync.versions.staged import StagedChanges
from tests.weight_sync.publisher import read, require_equal

ZEROS, ONES = np.zeros(9, np.uint8), np.ones(9, np.uint8)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_all_bytes_may_change(encoding):
    change = difference(ONES, ZEROS, encoding)
    assert change.changed == 9 and (apply(ZEROS, change.payload, encoding) == ONES).all()


def test_a_change_of_no_byte_is_one_too():
    assert (apply(ONES, zstandard.compress(struct.pack("<I", 0)), "overwrite") == ONES).all()


@pytest.mark.parametrize(
    ("encoding", "size", "wanted"),
    [("xor", 8, "9 to 9"), ("xor", 10, "9 to 9"), ("overwrite", 3, "4 to 49"), ("overwrite", 50, "4 to 49")],
)
def test_changes_of_another_size_are_refused(encoding, size, wanted):
    """Before they are decompressed: their head announces it."""
    with pytest.raises(ValueError, match=rf"^{size} bytes of changes \(wanted: {wanted}\)"):
        apply(ZEROS, zstandard.compress(bytes(size)), encoding)


def test_a_number_of_positions_that_does_not_fit_is_named():
    payload = zstandard.compress(struct.pack("<II", 1, 0) + bytes(2))
    with pytest.raises(ValueError, match=r"^10 bytes of changes \(wanted: 9, for 1 positions\)"):
        apply(ZEROS, payload, "overwrite")


def test_a_version_that_was_not_finished_is_none(publisher, local):
    """Also one that has all its files but not its name yet."""
    publisher.publish(1)
    made = pull(publisher.root, local, 1)
    made.rename(local / f".{made.name}.partial")
    assert pull(publisher.root, local, 1) == made
    require_equal(made, publisher.kept[1])


def test_directories_are_of_versions_by_their_names(tmp_path):
    names = ("weight_v000004", ".weight_v000005.partial", "weight_v1000000", "weight_v3", "weights", ".lock")
    assert [version_of(tmp_path / name) for name in names] == [4, 5, 1000000, None, None, None]
    for name in names:
        (tmp_path / name).mkdir()
    remove_others(tmp_path, {5})
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {"weight_v000004", "weight_v1000000"}


def test_the_version_on_which_one_builds_stays_beside_it(publisher, local):
    publisher.publish(3, whole=(1, 3))
    pull(publisher.root, local, 1)
    pull(publisher.root, local, 2)
    assert sorted(path.name for path in local.iterdir())[1:] == ["weight_v000001", "weight_v000002"]
    pull(publisher.root, local, 3)
    assert sorted(path.name for path in local.iterdir())[1:] == ["weight_v000003"]


def test_a_change_that_leads_to_another_tensor_names_it(publisher, local):
    publisher.publish(1)
    base, held = publisher.manifest, bytes_in(publisher.kept[1]["wide"])
    entry = base.tensors["wide"]._replace(digest=checksum("xxh3-128", held ^ 1))
    staged = StagedChanges(publisher.root, 2, base, "xor")
    staged.write_changes({"wide": (entry, difference(held ^ 2, held, "xor").payload)})
    staged.publish(publisher.assets)
    with pytest.raises(ValueError, match=rf"weight_v000002: wide: checksum \w+ \(wanted: {entry.digest}\)"):
        pull(publisher.root, local, 2)


def test_a_change_of_a_tensor_that_was_not_there_is_named(publisher, local):
    publisher.publish(2)
    path = publisher.directory(2) / MANIFEST
    content = json.loads(path.read_bytes())
    content["tensors"]["new"] = content["tensors"]["wide"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"weight_v000002: new: is another tensor than in the version"):
        pull(publisher.root, local, 2)


@pytest.mark.parametrize("change", [{"shape": [3, 5]}, {"dtype": "int32"}])
def test_a_change_of_another_tensor_is_named(publisher, local, change):
    publisher.publish(2)
    path = publisher.directory(2) / MANIFEST
    content = json.loads(path.read_bytes())
    content["tensors"]["wide"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"weight_v000002: wide: is another tensor than in the version"):
        pull(publisher.root, local, 2)


def test_changes_that_lead_elsewhere_are_named(publisher, local):
    publisher.publish(2)
    path = publisher.directory(2) / MANIFEST
    state = Manifest.read(publisher.directory(2)).state
    path.write_text(path.read_text().replace(state, "0"))
    with pytest.raises(
        ValueError, match=rf"v000002: the versions before it lead to state {state} \(wanted: 0\)"
    ):
        pull(publisher.root, local, 2)


def test_a_file_in_another_format_than_its_manifest_says_is_named(publisher, local):
    publisher.publish(1)
    path = publisher.directory(1)
    content = json.loads((path / MANIFEST).read_bytes())
    content["tensors"]["wide"]["dtype"] = "int32"
    (path / MANIFEST).write_text(json.dumps(content))
    tensors = publisher.manifest.tensors
    content["state"] = state_of(tensors | {"wide": tensors["wide"]._replace(dtype="int32")})
    (path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="weight_v000001: a tensor has another format than its manifest"):
        pull(publisher.root, local, 1)


def test_a_reader_looks_now_and_then_whether_another_one_is_done(publisher, local, monkeypatch):
    monkeypatch.setattr("slime.weight_sync.versions.local._POLL_S", 0.2)
    publisher.publish(1)
    local.mkdir()
    lock = (local / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    begun = time.monotonic()
    threading.Timer(0.05, lock.close).start()
    require_equal(pull(publisher.root, local, 1, timeout_s=300), publisher.kept[1])
    assert time.monotonic() - begun >= 0.2


def test_a_reader_waits_for_another_one_as_long_as_it_may_and_no_longer(publisher, local, monkeypatch):
    publisher.publish(1)
    local.mkdir()
    now, waits = [8.0], []

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("slime.weight_sync.versions.local.time", clock)
    monkeypatch.setattr("slime.weight_sync.versions.local._POLL_S", 0.25)
    with (local / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another reader has it for 1 s \(wanted: its end\)"):
            pull(publisher.root, local, 1, timeout_s=1.0)
    assert waits == [0.25] * 4


def test_a_version_says_how_large_it_is(publisher):
    publisher.publish(2)
    for version in (1, 2):
        index = json.loads((publisher.directory(version) / INDEX).read_bytes())
        files = {*index["weight_map"].values()}
        assert files == {f"model-{number:05d}.safetensors" for number in range(1, len(files) + 1)}
        held = sum(tensor.nbytes for tensor in read(publisher.directory(version)).values())
        assert index["metadata"]["total_size"] == held


def test_a_version_without_its_weights_is_not_taken_for_one_that_is_held(publisher, local):
    publisher.publish(1)
    publisher.changes()  # of nothing: all tensors that it has are whole
    shutil.copytree(publisher.directory(2), local / publisher.directory(2).name)
    require_equal(pull(publisher.root, local, 2), publisher.kept[2])


def test_changes_that_are_none_have_no_file(publisher):
    publisher.publish(1)
    staged = StagedChanges(publisher.root, 2, publisher.manifest, "xor")
    assert staged.write_changes({}) == 0
    assert staged.publish(publisher.assets).tensors == {}
    assert not [*publisher.directory(2).glob("*.safetensors")]
