"""What versions on a disk are held against writes all bytes, and what goes before it leaves nothing."""

from benchmarks import disk_floor


def test_a_file_has_as_many_bytes_and_each_writer_begins_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_floor, "_WRITTEN_AT_ONCE", 64)
    monkeypatch.setattr("os.sync", lambda: synchronised.append([*tmp_path.iterdir()]))
    synchronised: list = []
    begin, write = disk_floor.file_alone(1000, tmp_path)
    for _ in range(2):
        begin()
        assert not [*tmp_path.iterdir()]
        write()
        assert [file.stat().st_size for file in tmp_path.iterdir()] == [1000]
    assert synchronised == [[], [tmp_path / "alone"]]
