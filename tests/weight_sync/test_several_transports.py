"""An update over several transports at once: each engine by the first that reaches it."""

import math

import pytest
import torch
import torch.distributed as dist

from slime.config.run import run_config
from slime.observability.spans import SpanList
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports.transport import Transport
from slime.weight_sync.update import WeightUpdate
from tests.run_args import run_args


class Source:
    """Two tensors, a bucket each."""

    ranks, rounding = frozenset({0}), 0.0

    def manifest(self):
        return [TensorInfo(name, (2,), torch.float32) for name in "ab"]

    def buckets(self, max_bytes):
        for name in "ab":
            yield [(name, torch.ones(2))]


class Pretended(Transport):
    """Notes what is asked of it, and says that it has sent so many bytes of each bucket."""

    speed = math.inf

    def __init__(self, name, reaches, nbytes, pause, log):
        self.name, self.reaches, self.nbytes, self.pause, self.log = name, reaches, nbytes, pause, log
        self.density, self.commit_time = pause / 10, pause / 5

    def _note(self, *what):
        self.log.append((self.name, *what))

    def accepts(self, endpoint):
        return endpoint.url in self.reaches

    def take_over(self):
        self._note("take over")

    def connect(self, endpoints):
        self._note("connect", *(each.url for each in endpoints))

    def prepare(self, bucket, plan):
        self._note("prepare", bucket[0][0])
        return True

    def open(self, version, plan):
        self._note("open", version)

    def send(self, bucket, is_last):
        self._note("send", bucket[0][0], is_last)
        return self.nbytes

    def settle(self) -> None:
        pass

    def commit(self):
        self._note("commit")

    def resume(self):
        self._note("resume")

    def disconnect(self):
        self._note("disconnect")

    def path_speed(self):
        self._note("probe")
        return self.speed


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def endpoints(*urls):
    return [EngineEndpoint(url, None, 1, None) for url in urls]


@pytest.fixture
def log():
    return []


@pytest.fixture
def update(log):
    first = Pretended("first", {"one", "two"}, 3, 0.5, log)
    second = Pretended("second", {"two", "three"}, 4, 2.5, log)
    config = run_config(run_args(distributed_timeout_minutes=1, update_weight_buffer_size=1))
    return WeightUpdate(config, Source(), [first, second])


def test_no_engine_goes_on_before_all_have_the_weights(update, log):
    update.connect(endpoints("one", "two", "three"))
    assert log[:2] == [("first", "connect", "one", "two"), ("second", "connect", "three")]
    log.clear()
    report = update.run(5)
    assert (report.sent, report.pause, report.density) == (2 * (3 + 4), 2.5, 0.25)
    assert report.commit == 0.5
    both = ("first", "second")
    assert log == [
        *((name, "prepare", "a") for name in both),
        *((name, "open", "5") for name in both),
        *((name, "send", tensor, tensor == "b") for tensor in "ab" for name in both),
        *((name, "commit") for name in both),
        *((name, "resume") for name in both),
    ]


@pytest.mark.parametrize("looking", [(True, True), (False, True), (False, False)])
def test_further_buckets_are_prepared_ahead_where_all_that_serve_do_so(update, log, looking):
    for transport, looks_ahead in zip(update._transports, looking, strict=True):
        transport.looks_ahead = looks_ahead
    update.connect(endpoints("one", "three"))
    log.clear()
    assert update.run(1).sent == 2 * (3 + 4)
    assert [event for event in log if event[1] in ("prepare", "send", "open")] == [
        *((name, "prepare", tensor) for tensor in "ab"[: 1 + all(looking)] for name in ("first", "second")),
        *((name, "open", "1") for name in ("first", "second")),
        *((name, "send", tensor, tensor == "b") for tensor in "ab" for name in ("first", "second")),
    ]
    update.connect(endpoints("three"))
    log.clear()
    update.run(2)
    assert log.count(("second", "prepare", "b")) == looking[1]


def test_what_a_failed_update_has_gathered_is_given_up_with_its_engines(update, log, monkeypatch):
    update.connect(endpoints("one"))
    gathered, buckets = [], Source.buckets

    def noted(source, most):
        for bucket in buckets(source, most):
            gathered.append(bucket[0][0])
            yield bucket

    def refuse(version, plan):
        raise OSError("gone")

    monkeypatch.setattr(Source, "buckets", noted)
    with monkeypatch.context() as failing, pytest.raises(OSError, match="gone"):
        failing.setattr(update._transports[0], "open", refuse)
        update.run(1)
    update.connect([])
    assert update.run(2).sent == 0 and gathered == ["a"]
    update.connect(endpoints("one"))
    assert update.run(3).sent == 2 * 3 and gathered == ["a", "a", "b"]


def test_one_that_serves_no_engine_rests(update, log):
    update.connect(endpoints("three"))
    log.clear()
    assert update.run(1).sent == 2 * 4
    assert {name for name, *_ in log} == {"second"}


def test_an_engine_that_none_reaches_is_named(update):
    with pytest.raises(ValueError, match=r"no transport reaches the engines \['four'\]"):
        update.connect(endpoints("one", "four"))


def test_all_take_over_and_all_leave(update, log):
    update.take_over()
    update.disconnect()
    names = ("first", "second")
    assert log == [*((name, "take over") for name in names), *((name, "disconnect") for name in names)]


def test_what_cannot_be_sent_is_known_before_an_engine_stops(update, log, monkeypatch):
    update.connect(endpoints("one"))
    log.clear()
    same = [TensorInfo("a", (2,), torch.float32)] * 2
    monkeypatch.setattr(Source, "manifest", lambda source: same)
    with pytest.raises(ValueError, match="'a': is in the update twice"):
        update.run(1)
    assert log == []


def test_ranks_among_which_none_sends_give_nothing(log, monkeypatch):
    elsewhere = Pretended("elsewhere", {"one"}, 3, 0.5, log)
    monkeypatch.setattr(elsewhere, "source_ranks", lambda: {1})
    monkeypatch.setattr(Source, "buckets", None)
    update = WeightUpdate(run_config(run_args(distributed_timeout_minutes=1)), Source(), [elsewhere])
    update.connect(endpoints("one"))
    assert update.run(1).sent == 0
    assert log[-2:] == [("elsewhere", "commit"), ("elsewhere", "resume")]


def test_the_floor_is_that_of_the_paths_which_are_known(update, log):
    """Each is probed once, and before an engine stops."""
    update._transports[1].speed = 16.0
    for _ in range(2):
        update.connect(endpoints("one", "three"))
    assert [name for name, what, *_ in log if what == "probe"] == ["first", "second"]
    assert [update.run(version).floor for version in (1, 2)] == [2 * 4 / 16.0] * 2
    assert ("first", "probe") not in log[log.index(("first", "open", "1")) :]


def test_a_trace_has_what_became_of_each_bucket(log):
    spans = SpanList()
    config = run_config(run_args(distributed_timeout_minutes=1, update_weight_buffer_size=1))
    update = WeightUpdate(config, Source(), [Pretended("first", {"one"}, 3, 0.5, log)], spans=spans)
    update.connect(endpoints("one"))
    update.run(1)
    found = spans.take()
    steps = ["prepare the first bucket", "pause engines and open the update", "send weights"]
    steps += ["close the update and continue"]
    assert [span.name for span in found if " " in span.name] == steps
    by_name = {name: [span for span in found if span.name == name] for name in ("gather", "convert", "send")}
    assert [len(each) for each in by_name.values()] == [3, 3, 2]  # the last one finds no bucket
    for inner, outer in zip(by_name["gather"], by_name["convert"], strict=True):
        assert outer.start <= inner.start <= inner.end <= outer.end
