"""What Prometheus would read, by its own parser."""

import socket
import struct
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.config.run import run_config
from slime.observability import prometheus
from slime.observability.prometheus import PrometheusSink
from slime.observability.tracking import init_tracking
from tests.run_args import with_groups


@pytest.fixture
def sink():
    sink = PrometheusSink(0)
    yield sink
    sink.close()


def _ask(port, path="/metrics", **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def _values(page):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_newest_value_of_each_metric_is_served(sink):
    sink.write("train", 0, {"train/loss": 0.5, "train/grad_norm": 2})
    sink.write("train", 1, {"train/loss": 0.25})
    sink.write("rollout", 7, {"rollout/raw_reward": float("nan"), "rollout/names": "text"})
    found = _values(_ask(sink.port))
    assert found["slime_train_loss", "train/loss"] == 0.25
    assert found["slime_train_grad_norm", "train/grad_norm"] == 2.0
    assert found["slime_step", "train"] == 1 and found["slime_step", "rollout"] == 7
    assert found["slime_rollout_raw_reward", "rollout/raw_reward"] != found["slime_train_loss", "train/loss"]
    assert not [name for name in found if "names" in name[0]]
    assert found["process_resident_memory_bytes",] > 0


def test_names_that_become_one_are_told_apart_by_their_label(sink):
    sink.write("eval", 0, {"eval/a-b": 1, "eval/a_b": 2, "eval/a.b": 3})
    found = _values(_ask(sink.port))
    assert [found["slime_eval_a_b", f"eval/a{mark}b"] for mark in "-_."] == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 404),
        ("/metrics", {"Host": "attacker.example"}, 403),
        ("/metrics", {"Origin": "https://attacker.example"}, 403),
    ],
)
def test_other_paths_and_other_sites_get_nothing(path, headers, status, sink):
    sink.write("train", 0, {"train/loss": 0.5})
    with pytest.raises(urllib.error.HTTPError) as refused:
        _ask(sink.port, path, **headers)
    assert refused.value.code == status and b"0.5" not in refused.value.read()


def test_a_client_that_says_nothing_delays_the_others_no_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(prometheus, "_READ_TIMEOUT_S", 0.1)
    with closing(PrometheusSink(0)) as sink, socket.create_connection(("127.0.0.1", sink.port)):
        assert "slime_step" in _ask(sink.port)


def test_a_client_that_goes_away_leaves_no_line(sink, capsys):
    with closing(socket.create_connection(("127.0.0.1", sink.port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets at its end
        client.sendall(b"GET /metr")
    assert _ask(sink.port)  # others come after it
    assert capsys.readouterr().err == ""


def test_a_taken_port_is_named_before_the_run_begins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = run_config(with_groups(dict(save=str(tmp_path), prometheus_port=port)))
        with pytest.raises(OSError, match=rf"--prometheus-port {port}: .* \(wanted: a free port\)"):
            init_tracking(config)


def test_the_flag_adds_it_and_the_end_of_the_run_closes_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tracker = init_tracking(run_config(with_groups(dict(save=str(tmp_path), prometheus_port=port))))
    tracker.log({"train/loss": 0.125}, axis="train", step=3)
    assert _values(_ask(port))["slime_train_loss", "train/loss"] == 0.125
    tracker.finish()
    with pytest.raises(urllib.error.URLError):
        _ask(port)
