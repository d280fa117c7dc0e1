"""A disk fails at any operation of an update: engines keep a whole version, and the next update works."""

import os
import threading
from datetime import timedelta
from functools import partial

import pytest

from tests.weight_sync.disk_faults import FULL, HANGS, READ_ONLY, Disk, small_disk
from tests.weight_sync.test_delta import Trainer, args, engines, require_equal, root  # noqa: F401
from tests.weight_sync.test_disk import group  # noqa: F401

pytestmark = pytest.mark.slow

MOST = 200
"""Operations of an update, and more."""


def copied(weights):
    return {name: tensor.clone() for name, tensor in weights.items()}


def failing_step(trainer, disk, operation, fault):
    """Breaks the disk at an operation of the next update; returns the error, None if there was none."""
    (engine,) = trainer.engines
    before, version = copied(engine.loaded), engine.weight_version
    disk.break_at(operation, fault)
    try:
        trainer.step()
        error = None
    except RuntimeError as raised:
        error = raised
        trainer.version -= 1  # versions are counted when all have them
    finally:
        disk.heal()
    require_equal(engine.loaded, before if engine.weight_version == version else trainer.source.weights)
    return error


@pytest.fixture(params=["full", "delta"])
def mode(request):
    return request.param


@pytest.fixture(params=["trainer", "engine"])
def place(request):
    return request.param


@pytest.fixture
def unstarted(args, engines, root, mode, place):  # noqa: F811
    """What makes a trainer of one engine, and the folder of one of both."""
    args.update_weight_mode = mode
    args.update_weight_buffer_size = 1  # a file for each tensor
    engine = engines()
    return partial(Trainer, args, engine), root if place == "trainer" else engine.local


@pytest.fixture
def updated(unstarted):
    """A trainer whose engine has its first weights, and the folder of one of both."""
    make, folder = unstarted
    trainer = make()
    trainer.step()
    return trainer, folder


@pytest.mark.parametrize("fault", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_fails_at_any_operation_is_named_and_the_next_update_is_whole(
    updated, monkeypatch, mode, place, fault
):
    trainer, folder = updated
    (engine,) = trainer.engines
    disk, failed = Disk(monkeypatch, folder), set()
    for operation in range(MOST):
        error = failing_step(trainer, disk, operation, fault)
        if not disk.failed:
            break
        failed.add(disk.failed[0])
        if error is not None:
            assert str(folder) in str(error) and any(s in str(error) for s in ("No space", "Read-only")), (
                error
            )
            if fault == FULL:
                assert not [*folder.glob(".*.partial")], (operation, disk.failed)
        trainer.connect(engine)
        trainer.step()
        assert not [*folder.glob(".*.partial")]
    assert error is None and operation < MOST - 1
    assert failed >= {"mkdir", "open", "pwrite", "write_text"}
    changes_alone = (mode, place) == ("delta", "trainer")
    assert "copyfile" in failed or changes_alone  # which have no tokenizer
    if fault == READ_ONLY:
        assert "rename" in failed and ("unlink" in failed or changes_alone)


def end_accesses():
    for thread in threading.enumerate():
        if thread.name.startswith("access to "):
            thread.join(600)


@pytest.mark.parametrize("operation", [0, 3, 9])
def test_a_disk_that_hangs_for_a_while_is_named_and_the_next_update_is_whole(
    updated,
    root,  # noqa: F811
    monkeypatch,
    operation,
):
    trainer, folder = updated
    (engine,) = trainer.engines
    disk = Disk(monkeypatch, folder)
    (transport,) = trainer.update._transports
    with monkeypatch.context() as hurried:
        for seconds in (0.5, 5, 50):  # a busy machine may need longer for what comes before
            hurried.setattr(transport, "_timeout", timedelta(seconds=seconds))
            hurried.setattr(transport, "_answer_limit", seconds)
            trainer.connect(engine)
            error = failing_step(trainer, disk, operation, HANGS)
            end_accesses()
            if disk.failed:
                break
    assert disk.failed and (f"{root}: access to" in str(error) or f"engine {engine.url}: " in str(error)), (
        error
    )
    trainer.connect(engine)
    trainer.step()
    assert not [*disk.folder.glob(".*.partial")]


def test_a_small_disk_is_named_while_it_is_full_and_takes_a_version_as_soon_as_there_is_room(unstarted):
    """A real one, of which a file leaves ever more pages."""
    make, folder = unstarted
    page, pages = 4096, 64
    with small_disk(folder, pages * page) as mounted:
        if not mounted:
            pytest.skip("file systems cannot be mounted here")
        trainer, room, failures = make(), 0, 0
        trainer.step()
        (engine,) = trainer.engines
        filler = folder / "filler"
        while failures < pages:
            version, before = trainer.version, copied(engine.loaded)
            filler.write_bytes(bytes(max(0, free_bytes(folder) - room * page)))
            try:
                trainer.step()
                break
            except RuntimeError as error:
                assert str(folder) in str(error) and "No space" in str(error)
            require_equal(engine.loaded, before)
            assert not [*folder.glob(".*.partial")]
            trainer.version, room, failures = version, room + 1, failures + 1
            filler.unlink()
            trainer.connect(engine)
        assert 3 < failures < pages


def free_bytes(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
