"""``slime weights follow`` beside a real engine: killed, started again, and given damaged changes."""

import contextlib
import platform
import subprocess

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.cli import weights
from slime.cli.main import main
from slime.config.run import run_config
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.board import Board, bad_name
from slime.weight_sync.versions.manifest import VersionManifest, directory_of
from tests.engines.embedded import Server, make_checkpoint
from tests.forking import ForkedScript
from tests.page_runs import printed
from tests.run_args import run_args

KEY, GIVEN_UP_S = "key-of-the-engine", 240
PROMPT = list(range(40, 60))


class Trained:
    """Weights of a checkpoint, of which a few change with each step."""

    ranks, rounding = frozenset({0}), 0.0

    def __init__(self, checkpoint):
        self.weights = load_file(checkpoint / "model.safetensors")
        self.random = torch.Generator().manual_seed(1)

    def train(self):
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            flat[torch.randint(len(flat), (3,), generator=self.random)] += 0.5

    def manifest(self):
        return [TensorInfo(name, tuple(one.shape), one.dtype) for name, one in self.weights.items()]

    def buckets(self, max_bytes):
        yield list(self.weights.items())


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def follow(tmp_path):
    """A function that starts the command; what it started is killed at the end."""
    started = []

    def start(place, url, local="local"):
        words = ["weights", "follow", place, "--engine", url, "--key-variable", "ENGINE_KEY"]
        words += ["--local-checkpoint-dir", str(tmp_path / local), "--poll-seconds", "0.05"]
        log = tmp_path / f"follow{len(started)}.log"
        started.append(ForkedScript("slime.cli", words, str(log), env={"ENGINE_KEY": KEY}))
        return started[-1], log

    yield start
    for process in started:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GIVEN_UP_S)


def test_an_unpatched_engine_generates_as_a_fresh_one_with_the_trainers_weights(group, follow, tmp_path):
    checkpoint, root = tmp_path / "served", tmp_path / "versions"
    make_checkpoint(checkpoint)
    server = Server(checkpoint, "--dtype", "float32", "--api-key", KEY).wait_ready()
    server.client.headers["Authorization"] = f"Bearer {KEY}"
    args = run_args(
        **dict(update_weight_transport="disk", update_weight_mode="delta", distributed_timeout_minutes=10),
        **dict(update_weight_disk_dir=str(root), synced_checkpoint=str(checkpoint), rollout_external=True),
    )
    source = Trained(checkpoint)
    update = WeightUpdate(run_config(args), source)
    update.connect([EngineEndpoint(server.url, KEY, 1, None)])
    (transport,) = update._routes[0].transports
    try:
        process, _ = follow(str(root), server.url)
        for version in (1, 2):
            source.train()
            update.run(version)
        process.kill()
        process.wait(GIVEN_UP_S)
        _damage(transport, root)
        process, log = follow(str(root), server.url)
        source.train()
        update.run(3)
        assert VersionManifest.read(directory_of(root, 3)).base is None  # it came whole
        source.train()
        update.run(4)
        assert VersionManifest.read(directory_of(root, 4)).base.version == 3
        assert server.client.get("/model_info").json()["weight_version"] == "4"
        assert _answer(server) == _answer_of_fresh_engine(source, checkpoint, tmp_path / "fresh")
        _require_alone(follow, str(root), server.url, tmp_path)
        source.train()
        update.run(5)
        process.terminate()
        assert process.wait(GIVEN_UP_S) == 0
        assert "version 5 is served" in log.read_text()
        assert Board(str(root)).followers() == {} and KEY not in log.read_text()
    finally:
        server.stop()


def _require_alone(follow, place, url, tmp_path):
    """Neither its engine nor its directory is another follower's, whatever that is called."""
    refused = {
        "local": f"error: --local-checkpoint-dir {tmp_path / 'local'}: in use by process ",
        "other": f"error: engine {url}: follower {platform.node()}-127.0.0.1-",
    }
    for local, said in refused.items():
        process, log = follow(place, url, local)
        assert process.wait(GIVEN_UP_S) == 1
        assert said in log.read_text()


def _damage(transport, root):
    """Changes of version 3 are damaged when they are there, before anybody is told of them."""
    tell = transport._tell_written

    def spoil():
        version = directory_of(root, 3)
        if version.exists() and VersionManifest.read(version).base is not None:
            (file,) = version.glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 8
            file.write_bytes(data)
        tell()

    transport._tell_written = spoil


def _answer(server):
    answer = server.generate(PROMPT, {"max_new_tokens": 24, "temperature": 0.0}, return_logprob=True)
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


def _answer_of_fresh_engine(source, checkpoint, path):
    path.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(source.weights, path / "model.safetensors")
    server = Server(path, "--dtype", "float32").wait_ready()
    try:
        return _answer(server)
    finally:
        server.stop()


def test_two_hosts_that_are_called_the_same_have_other_names(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "localhost")
    one, other = (weights._name("http://127.0.0.1:30000", home) for home in ("1f" * 16, "2e" * 16))
    assert (one, other) == ("localhost-127.0.0.1-30000-1f1f1f1f", "localhost-127.0.0.1-30000-2e2e2e2e")
    monkeypatch.setattr(platform, "node", lambda: "-" * 200)
    assert bad_name(weights._name("http://h:1", "1f" * 16)) is None


def test_commands_of_pages_are_understood(monkeypatch, tmp_path):
    followed = []
    monkeypatch.setattr(weights, "_follow", lambda asked, follower: followed.append(asked.place) or 0)
    monkeypatch.setattr(weights, "home_of", lambda local: contextlib.nullcontext("of-" + local.name))
    monkeypatch.setenv("ENGINE_KEY", KEY)
    commands = printed("slime weights")
    assert commands
    for command in commands:
        assert main([*command.words[1:]]) == 0
    assert len(followed) == len(commands)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"place": "s3://k:secret@bucket/run"}, "s3://...: has a user or a password in it"),
        ({"--engine": "http://k:secret@host:1"}, "--engine: is no address of an engine"),
        ({"--local-checkpoint-dir": "/versions/"}, "--local-checkpoint-dir /versions: is the trainer's"),
        ({"--known-as": "host"}, "--known-as: is no address of an engine"),
        ({"--name": "../f"}, "--name '../f' (wanted: letters"),
        ({"--poll-seconds": "nan"}, "--poll-seconds nan (wanted: above 0)"),
        ({"--key-variable": "NOT_SET"}, "--key-variable NOT_SET: not set (wanted: export NOT_SET=KEY)"),
    ],
)
def test_what_cannot_be_used_is_named_and_no_secret_is_shown(changes, said, capsys):
    values = {"place": "/versions", "--engine": "http://h:1", "--local-checkpoint-dir": "/local", **changes}
    words = [word for name, value in values.items() for word in (name, value) if word != "place"]
    assert main(["weights", "follow", *words]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}") and "secret" not in told
