"""Versions, and notes beside them, in an object store that speaks S3: moto's, which is not ours."""
# ruff: noqa: F811 (fixtures of another file)

import urllib.request
import uuid

import pytest

from slime.weight_sync.presence import Taken
from slime.weight_sync.transports.followers import Followers
from slime.weight_sync.versions import pulse
from slime.weight_sync.versions.board import Board
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import directory_of
from slime.weight_sync.versions.owner import DirectoryTaken
from slime.weight_sync.versions.pulse import SILENT_S
from slime.weight_sync.versions.remote import Remote
from tests.weight_sync.publisher import Publisher, require_equal
from tests.weight_sync.test_delta import Trainer
from tests.weight_sync.test_delta import require_equal as require_loaded
from tests.weight_sync.test_disk import group  # noqa: F401
from tests.weight_sync.test_followed import (  # noqa: F401
    args,
    at_once,
    come,
    engines,
    follower_of,
    following,
    root,
)
from tests.weight_sync.test_presence import Clock

server = pytest.importorskip("moto.server", reason="wanted: pip install 'moto[server]'")


@pytest.fixture(scope="module")
def endpoint():
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def url(endpoint, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = uuid.uuid4().hex
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")).read()
    return f"s3://{bucket}/run7"


def test_versions_are_published_read_and_removed(url, local, tmp_path):
    place = Remote(url)
    place.take("here:1:old")
    (tmp_path / "shared").mkdir()
    publisher = Publisher(tmp_path / "shared", place=place)
    publisher.publish(6, whole=(1, 4))
    for version in (1, 2, 6):
        path = pull(place.source, local, version)
        assert path == directory_of(local, version)
        require_equal(path, publisher.kept[version])
    place.remove_others({4, 5, 6})
    store = place._store
    own = place.source.removeprefix(url + "/")
    assert store.names(own) == [".here", "weight_v000004", "weight_v000005", "weight_v000006"]
    file = f"{own}/weight_v000006/model-00001.safetensors"
    whole = store.get(file)
    for damaged in (whole[:-2], None):
        store.remove(file) if damaged is None else store.put(file, [damaged])
        with pytest.raises(ValueError, match=rf"^{place.source}: .*weight_v000006.*"):
            pull(place.source, tmp_path / f"fresh{damaged is None}", 6)
    successor = Remote(url)
    successor.take("here:2:new")
    with pytest.raises(DirectoryTaken, match="here-2-new has taken its place"):
        place.require("here:1:old")
    assert place.speed(1000) > 0
    successor.draft(1).write_json("notes", {})
    successor.remove_others({1})
    assert store.names() == ["trainer_000002_here-2-new"]


def test_a_bucket_that_is_not_there_is_named(url):
    with pytest.raises(OSError, match=r"^s3://no-such-bucket/run7.*(does not exist|is not there)"):
        Remote("s3://no-such-bucket/run7").take("here:1:old")


def test_an_engine_follows_what_is_published_there(url, args, engines, monkeypatch):
    """Over two trainers; a second follower of the engine is refused, one that was killed is found out."""
    args.update_weight_disk_dir = url
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, url)):
        trainer.step()
        trainer.step()
        with pytest.raises(Taken, match=f"engine {engine.url}: follower f gives it weights"):
            come(follower_of(engine, url, "g", home="another"))
        trainer = Trainer(args, engine)
        trainer.step()
    board = Board(url)
    (left,) = board.followers()
    monkeypatch.setattr(pulse, "time", Clock(step=SILENT_S))
    known = Followers(board)
    assert [*known.look()] == [left] and known.look() == {} == board.followers()
    follower = come(follower_of(engine, url))
    assert follower.step().version == 1
    require_loaded(engine.loaded, trainer.source.weights)
    follower._presence.__exit__(None, None, None)
    assert board.followers() == {}
