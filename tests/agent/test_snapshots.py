"""Snapshots of sandboxes: what starts from one, who prepares it, and that no episode changes it."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.agent.sandbox import (
    ContainerSandbox,
    E2BSandbox,
    Limits,
    LocalSandbox,
    Prepared,
    SandboxError,
    SandboxPool,
    by_line,
    container,
    owners,
)
from tests.agent.containers import IMAGE, REAL_IMAGE, StandIn, has_namespaces, real_engine

pytestmark = pytest.mark.slow
PREPARE = "mkdir -p a/b && echo deep > a/b/c && ln -s b/c a/link && echo '#!/bin/sh' > run && chmod 755 run"
LOOK = "cat a/link; test -x run && echo can be run; ls"
SEEN = "deep\ncan be run\na\nrun\n"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    if not has_namespaces():
        pytest.skip("the stand-in for docker needs namespaces")
    made = StandIn(tmp_path, monkeypatch)
    yield made
    made.remove_all()


@pytest.fixture(params=["local", "stand-in", "real"])
async def make(request):
    """Makes sandboxes that start in an empty folder."""
    if request.param == "local":
        try:
            async with LocalSandbox():
                return lambda: LocalSandbox(limits=Limits(file_bytes=1 << 20))
        except SandboxError as error:
            pytest.skip(str(error))
    if request.param == "real":
        if not real_engine():
            pytest.skip("SLIME_TEST_CONTAINER_IMAGE names no image, or there is no engine")
        return lambda: ContainerSandbox(REAL_IMAGE, workdir="/media")
    request.getfixturevalue("engine")
    return lambda: ContainerSandbox(IMAGE, workdir="/workspace")


async def said(sandbox, line):
    code, output = await sandbox.exec(line)
    assert code == 0, output
    return output


async def test_sandboxes_start_from_what_one_was_prepared_to_be_and_change_nothing_of_it(make):
    async with make() as first:
        await said(first, PREPARE)
        snapshot = await first.snapshot()
        await said(first, "rm -r a run; echo later > later")
    try:
        for _ in range(2):
            async with snapshot.sandbox() as one, snapshot.sandbox() as other:
                assert await said(one, LOOK) == SEEN
                await said(one, "echo changed > a/b/c; rm run; echo mine > mine")
                await one.exec(
                    f"echo x > {snapshot.source}; rm -f {snapshot.source}; chmod 777 {snapshot.source}"
                )
                assert await said(other, LOOK) == SEEN
    finally:
        await snapshot.remove()


async def test_a_pool_prepares_once_and_all_start_from_it(make):
    prepared = []

    async def prepare(sandbox):
        prepared.append(sandbox)
        await by_line(PREPARE)(sandbox)

    async with SandboxPool(make, size=2, prepare=prepare) as pool:
        for _ in range(4):
            async with pool.sandbox() as sandbox:
                assert await said(sandbox, LOOK) == SEEN and sandbox not in prepared
                await said(sandbox, "rm -r a")
        assert len(prepared) == 1


async def test_files_of_any_size_and_right_are_in_it(make):
    sums = "for one in f.*; do cksum < $one; done; stat -c %a f.aa"
    async with make() as first:
        line = "for n in aa ab ac ad; do head -c 900000 /dev/urandom > f.$n; done; chmod 600 f.aa"
        await said(first, line)
        wanted, snapshot = await said(first, sums), await first.snapshot()
    async with snapshot.sandbox() as other:
        assert await said(other, sums) == wanted and wanted.endswith("600\n")
    await snapshot.remove()


class Plain:
    """A sandbox without snapshots, whose files are a list."""

    opened = 0

    def __init__(self):
        self.files, self.is_open = [], False

    async def __aenter__(self):
        self.is_open, Plain.opened = True, Plain.opened + 1
        return self

    async def __aexit__(self, *error):
        self.is_open = False


async def test_where_there_are_no_snapshots_each_sandbox_is_prepared():
    made = []

    async def prepare(sandbox):
        made.append(sandbox)
        sandbox.files.append("prepared")

    source = Prepared(Plain, prepare)
    first, second = await source.start(), await source.start()
    assert made == [first, second] and first.files == second.files == ["prepared"]


@pytest.mark.parametrize("error", [SandboxError("no disk"), ZeroDivisionError("of a user's")])
async def test_one_that_cannot_be_prepared_is_ended_and_the_next_one_tries_again(error):
    made = []

    async def prepare(sandbox):
        made.append(sandbox)
        if len(made) == 1:
            raise error

    source = Prepared(Plain, prepare)
    with pytest.raises(SandboxError, match=r"no disk|could not be prepared: ZeroDivisionError"):
        await source.start()
    assert not made[0].is_open and (await source.start()).is_open


async def test_several_who_come_at_once_wait_for_one(make):
    prepared = []

    async def prepare(sandbox):
        prepared.append(sandbox)
        await by_line(PREPARE)(sandbox)

    source = Prepared(make, prepare)
    started = await asyncio.gather(*(source.start() for _ in range(3)))
    assert len(prepared) == 1 and [await said(one, LOOK) for one in started] == [SEEN] * 3
    for one in started:
        await one.close()
    await source.close()


async def test_a_line_that_fails_says_how(make):
    with pytest.raises(SandboxError, match="echo why; exit 3: exit code 3: why"):
        await Prepared(make, by_line("echo why; exit 3")).start()


async def test_a_snapshot_that_could_be_changed_is_refused():
    options = {"namespaces": False, "allow_weaker": True, "python": "/usr/bin/python3"}
    async with LocalSandbox(**options) as sandbox:
        with pytest.raises(SandboxError, match="could be changed by whoever starts from it: switched off"):
            await sandbox.snapshot()


def test_a_snapshot_that_nobody_removes_ends_with_its_process():
    lines = (
        "import asyncio, os\n"
        "from slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    async with LocalSandbox() as sandbox:\n"
        "        source = (await sandbox.snapshot()).source\n"
        "        print(source, os.path.exists(source))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300)
    if "this machine cannot hold" in done.stderr:
        pytest.skip(done.stderr[-200:])
    source, was_there = done.stdout.split()
    assert was_there == "True" and not Path(source).parent.exists()


async def test_what_is_beyond_the_room_of_a_sandbox_is_no_snapshot():
    limits = Limits(disk_bytes=4 << 20, file_bytes=4 << 20)
    try:
        async with LocalSandbox(limits=limits) as sandbox:
            await said(
                sandbox, "head -c 3000000 /dev/urandom > large; head -c 3000000 /dev/urandom > /tmp/other"
            )
            with pytest.raises(SandboxError, match=r"a snapshot: exit code \d+: .*No space left"):
                await sandbox.snapshot()
    except SandboxError as error:
        pytest.skip(str(error))


async def test_images_end_with_the_process_that_made_them(engine, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    async with ContainerSandbox(IMAGE) as first:
        mine = await first.snapshot()
        monkeypatch.setattr(owners, "image_labels", lambda: {owners.KEPT_BY: owners._owner(ended.pid)})
        theirs = await first.snapshot()
        monkeypatch.setattr(owners, "image_labels", lambda: {owners.KEPT_BY: "another-kernel/pid:[1] 1 1"})
        elsewhere = await first.snapshot()
    assert await owners.remove_orphaned_images(str(engine.program)) == []
    ended.communicate(b"\n", timeout=300)
    container._SWEPT.clear()
    async with mine.sandbox(), elsewhere.sandbox():
        with pytest.raises(SandboxError, match="no such image"):
            async with theirs.sandbox():
                pass
        await mine.remove()  # a container of it runs
    async with mine.sandbox():
        pass
    await mine.remove()
    with pytest.raises(SandboxError, match="no such image"):
        container._IMAGES.clear()
        async with mine.sandbox():
            pass


async def test_an_image_that_the_engine_does_not_make_is_told(engine):
    async with ContainerSandbox(IMAGE) as first:
        facts = engine.folder / "containers" / first.name / "facts.json"
        hidden = facts.rename(facts.with_name("hidden"))
        with pytest.raises(SandboxError, match="no image could be made of a container: Error: no such"):
            await first.snapshot()
        hidden.rename(facts)  # or nobody would remove it
    with pytest.raises(SandboxError, match="is not open"):
        await first.snapshot()


async def test_e2b_keeps_its_snapshots_itself(monkeypatch):
    calls = []

    class Box:
        @classmethod
        async def create(cls, **options):
            calls.append(options)
            return cls()

        async def create_snapshot(self):
            return SimpleNamespace(snapshot_id="kept")

        @staticmethod
        async def delete_snapshot(source):
            calls.append(source)

        async def kill(self):
            pass

    monkeypatch.setitem(sys.modules, "e2b", SimpleNamespace(AsyncSandbox=Box))
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    async with E2BSandbox("mine", timeout=70) as first:
        snapshot = await first.snapshot()
    async with snapshot.sandbox():
        pass
    await snapshot.remove()
    wanted = [("md", {"image": "mine"}), ("kept", {})]
    assert [(one["template"], one["metadata"]) for one in calls[:2]] == wanted
    assert [one["timeout"] for one in calls[:2]] == [70, 70] and calls[2] == "kept"
    monkeypatch.delattr(Box, "create_snapshot")
    async with E2BSandbox("mine") as older:
        with pytest.raises(SandboxError, match=r"has no snapshots \(wanted: 2.63"):
            await older.snapshot()
