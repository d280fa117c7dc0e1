"""``slime doctor`` names what a machine lacks."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from slime.cli import doctor
from slime.cli.main import main

Usage = namedtuple("Usage", "total used free")


def test_each_part_is_told_in_a_line_that_can_be_parsed(capsys) -> None:
    status = main(["doctor", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = {row["part"] for row in found}
    assert {"Python", "memory", "disk", "shared memory", "ports", "packages", "SGLang"} <= parts
    assert status == int(any(row["state"] == "lack" for row in found))
    assert all(row["advice"] for row in found if row["state"] != "ok")


def test_a_container_with_little_shared_memory_lacks_it(monkeypatch, capsys) -> None:
    def usage(place: Path) -> Usage:
        free = 64 * 2**20 if str(place) == "/dev/shm" else 2**40
        return Usage(free, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "lack  shared memory  64.0 MiB free in /dev/shm\n" in page
    assert "-> wanted: 1.0 GiB; docker run --shm-size 8g, or --ipc host" in page
    assert "1 part(s) lack what a run needs." in page


def test_packages_out_of_range_and_absent_ones_are_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["numpy>=999", "no-such-package>=1", "torch>=2"])
    rows = {row.part: row for row in doctor.packages()}
    assert rows["numpy"].state == rows["no-such-package"].state == "lack"
    assert rows["no-such-package"].found == "not installed"
    assert rows["packages"].found.startswith("torch ")


def test_a_package_that_a_look_needs_may_be_missing(monkeypatch) -> None:
    def memory():
        raise ModuleNotFoundError(name="psutil")
        yield

    monkeypatch.setattr(doctor, "LOOKS", (memory,))
    (row,) = doctor.findings()
    assert (row.part, row.found) == ("memory", "not looked at, without the package psutil")


def test_an_address_where_nobody_listens_is_told(monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (row,) = doctor.cluster()
    assert row.state == "lack" and "127.0.0.1:1" in row.found


@pytest.mark.parametrize(("count", "text"), [(10, "10 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")])
def test_sizes_are_for_people(count, text) -> None:
    assert doctor.size(count) == text
