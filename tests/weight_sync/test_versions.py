"""Changes of tensors, and checkpoints that readers make of them: the right weights, or an error by name."""

import fcntl
import os
import struct

import numpy as np
import pytest
import zstandard

from slime.utils.deadlines import within
from slime.weight_sync.versions.codec import apply, checksum, difference
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import MANIFEST, VersionManifest, directory_of
from tests.weight_sync.publisher import Publisher, random_bytes, require_equal

ENCODINGS = ("xor", "overwrite")


def test_a_change_leads_from_one_tensor_to_the_other():
    rng = np.random.default_rng(0)
    for encoding in ENCODINGS:
        for size in (1, 2, 7, 1000):
            base = random_bytes(rng, size)
            new = base.copy()
            new[rng.integers(0, size, max(1, size // 10))] ^= rng.integers(1, 256, dtype=np.uint8)
            found = difference(new, base, encoding)
            if found is None:
                assert (new == base).all()
                continue
            assert found.changed == int((new != base).sum())
            before = base.copy()
            assert (apply(base, found.payload, encoding) == new).all()
            assert (base == before).all()
    assert difference(base, base.copy(), "xor") is None


def test_payloads_are_those_of_the_original():
    """xor: new ^ old; overwrite: u32 count, u32 positions, the new bytes; all of it zstd."""
    base, new = np.array([1, 2, 3, 4], np.uint8), np.array([1, 9, 3, 7], np.uint8)
    raw = {name: zstandard.decompress(difference(new, base, name).payload) for name in ENCODINGS}
    assert raw["xor"] == bytes([0, 11, 0, 3])
    assert raw["overwrite"] == struct.pack("<III", 2, 1, 3) + bytes([9, 7])


def test_a_damaged_payload_is_never_applied():
    rng = np.random.default_rng(1)
    base, new = random_bytes(rng, 200), random_bytes(rng, 200)
    for encoding in ENCODINGS:
        payload = difference(new, base, encoding).payload
        for at in range(len(payload)):
            damaged = bytearray(payload)
            damaged[at] ^= 1 << int(rng.integers(8))
            try:
                found = apply(base, bytes(damaged), encoding)
            except ValueError:
                continue
            assert (found == new).all(), f"byte {at} of {encoding}"
        for cut in (0, 1, len(payload) // 2, len(payload) - 1):
            with pytest.raises(ValueError):
                apply(base, payload[:cut], encoding)
        with pytest.raises(ValueError, match="bytes of changes"):
            apply(base[:100], payload, encoding)


@pytest.mark.parametrize("positions", [(1, 1), (2, 1), (0, 4)], ids=["twice", "not ascending", "beyond"])
def test_positions_that_cannot_be_are_refused(positions):
    raw = struct.pack("<III", 2, *positions) + bytes(2)
    with pytest.raises(ValueError, match="positions of changes"):
        apply(np.zeros(4, np.uint8), zstandard.compress(raw), "overwrite")


def test_checksums_are_those_of_their_names():
    data = np.frombuffer(b"weights", np.uint8)
    assert checksum("adler32", data) == "0be202fc"
    assert checksum("xxh3-128", data) != checksum("blake3", data)
    assert len(checksum("xxh3-128", data)) == 32 and len(checksum("blake3", data)) == 64
    with pytest.raises(ValueError, match="wanted: xxh3-128, blake3 or adler32"):
        checksum("md5", data)


def test_a_reader_makes_each_version_whatever_it_has(publisher, local):
    """The one before, one of long ago, or nothing: then from the newest whole one."""
    publisher.publish(9, whole=(1, 6))
    for version in (1, 2, 4, 5, 9):
        path = pull(publisher.root, local, version)
        assert path == directory_of(local, version)
        require_equal(path, publisher.kept[version])
        assert (path / "config.json").read_text() == "{}"
    assert sorted(path.name for path in local.iterdir()) == [".lock", "weight_v000009"]


@pytest.mark.parametrize("algorithm", ["blake3", "adler32"])
def test_every_encoding_and_checksum_leads_to_the_same_weights(tmp_path, local, algorithm):
    (tmp_path / "shared").mkdir()
    publisher = Publisher(tmp_path / "shared", "overwrite", algorithm)
    publisher.publish(3)
    require_equal(pull(publisher.root, local, 3), publisher.kept[3])


def test_a_version_without_a_change_is_one_too(publisher, local):
    publisher.publish(2)
    publisher.changes()
    require_equal(pull(publisher.root, local, 3), publisher.kept[2])


def test_a_missing_link_is_named_and_not_needed_by_who_has_the_version_after_it(publisher, local, tmp_path):
    publisher.publish(4)
    pull(publisher.root, local, 3)
    publisher.directory(2).rename(tmp_path / "away")
    require_equal(pull(publisher.root, local, 4), publisher.kept[4])
    with pytest.raises(ValueError, match=r"weight_v000003: builds on version 2: .*is no version of weights"):
        pull(publisher.root, tmp_path / "fresh", 4)


def test_a_link_of_another_run_is_named(publisher, local, tmp_path):
    publisher.publish(3)
    other = Publisher(tmp_path / "shared2")
    other.rng = np.random.default_rng(9)
    (tmp_path / "shared2").mkdir()
    other.publish(2)
    other.directory(1).rename(tmp_path / "shared2" / "other")
    publisher.directory(1).rename(tmp_path / "away")
    (tmp_path / "shared2" / "other").rename(publisher.directory(1))
    with pytest.raises(ValueError, match=r"weight_v000002: builds on version 1 of state \w+ \(found: \w+\)"):
        pull(publisher.root, local, 3)
    assert not directory_of(local, 3).exists()


def _flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_no_byte_of_a_version_can_be_damaged_unseen(publisher, local, tmp_path):
    """Each file of a link, at many places: the right weights, or an error that names the directory."""
    publisher.publish(2)
    files = sorted(publisher.directory(2).glob("*"))
    refused = 0
    for file in files:
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 12)):
            _flip(file, at)
            try:
                path = pull(publisher.root, local, 2)
            except ValueError as error:
                refused += 1
                assert "weight_v000002" in str(error)
            else:
                require_equal(path, publisher.kept[2])
                for held in local.iterdir():
                    if held.is_dir():
                        held.rename(tmp_path / f"made-{file.name}-{at}")
            file.write_bytes(whole)
    assert refused > 10
    require_equal(pull(publisher.root, local, 2), publisher.kept[2])


def test_a_damaged_copy_of_its_own_is_made_anew(publisher, local):
    publisher.publish(3)
    file = pull(publisher.root, local, 2) / "model-00001.safetensors"
    _flip(file, file.stat().st_size - 1)
    require_equal(pull(publisher.root, local, 2), publisher.kept[2])
    file = directory_of(local, 2) / "model-00001.safetensors"
    _flip(file, file.stat().st_size - 1)
    require_equal(pull(publisher.root, local, 3), publisher.kept[3])


def test_a_number_that_is_published_again_with_other_weights_is_another_version(publisher, local):
    """After a failure for instance: what the number stood for before is not taken for it."""
    publisher.publish(3)
    pull(publisher.root, local, 3)
    publisher.version, publisher.weights = 2, dict(publisher.kept[2])
    publisher.manifest = VersionManifest.read(pull(publisher.root, local.parent / "second", 2))
    publisher.train()
    publisher.changes()
    require_equal(pull(publisher.root, local, 3), publisher.kept[3])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "not a manifest of weights"),
        ("{", "not a manifest of weights"),
        ('{"version": "1", "state": "x", "checksum": "xxh3-128", "tensors": {}}', "state x"),
        (
            '{"version": "1", "state": "x", "checksum": "c", "tensors": {}, '
            '"base": {"version": "1", "state": "y"}}',
            "builds on version 1",
        ),
        (
            '{"version": "1", "state": "x", "checksum": "c", "tensors": {"a": '
            '{"shape": [1], "dtype": "int8", "file": "../x", "digest": "0"}}}',
            "not a file of that directory",
        ),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path, content, said):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        VersionManifest.read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(publisher, local):
    publisher.publish(2)
    for name in (MANIFEST, "model-00001.safetensors"):
        file = publisher.directory(2) / name
        data = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(ValueError, match="weight_v000002"):
            within(60, "pull", lambda: pull(publisher.root, local, 2))
        file.unlink()
        file.write_bytes(data)


def test_readers_of_a_machine_come_one_after_the_other(publisher, local):
    publisher.publish(1)
    local.mkdir()
    with (local / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"{local}: another reader has it"):
            pull(publisher.root, local, 1, timeout_s=0.1)
    require_equal(pull(publisher.root, local, 1), publisher.kept[1])


def test_positions_that_have_no_room_are_refused(monkeypatch):
    monkeypatch.setattr("slime.weight_sync.versions.codec._MAX_POSITION", 4)
    ones, zeros = np.ones(5, np.uint8), np.zeros(5, np.uint8)
    assert difference(ones[:4], zeros[:4], "overwrite").changed == 4
    assert difference(ones, zeros, "xor").changed == 5
    with pytest.raises(ValueError, match="overwrite: a tensor of 5 bytes"):
        difference(ones, zeros, "overwrite")
