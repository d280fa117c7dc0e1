"""What Prometheus would read, by its own parser."""

import socket
import struct
import threading
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.config.run import run_config
from slime.observability import metrics_pages, prometheus
from slime.observability.metrics_pages import MetricsPage, merged
from slime.observability.prometheus import PrometheusSink
from slime.observability.tracking import init_tracking
from tests.engines import free_port
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
    """Values by name and labels, of a page that is valid: a family comes once and a series comes once."""
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    typed = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")]
    described = [line.split()[2] for line in page.splitlines() if line.startswith("# HELP ")]
    for names in (typed, described, [family.name for family in families]):
        assert [name for name, times in Counter(names).items() if times > 1] == []
    assert len(found) == len(samples) == sum(not line.startswith("#") for line in page.splitlines())
    return found


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
    monkeypatch.setattr(prometheus, "_READ_TIMEOUT_S", 1.0)  # the other one has as long
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


ENGINE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="tiny",model="x"} %d
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{version="3.11"} 1.0
# TYPE process_open_fds gauge
process_open_fds 9
# HELP sglang:latency_seconds Latency, "in" seconds\\n
# TYPE sglang:latency_seconds histogram
sglang:latency_seconds_bucket{le="0.5"} 1
sglang:latency_seconds_bucket{le="+Inf"} 2
sglang:latency_seconds_sum 1.5e-1
sglang:latency_seconds_count 2
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{} 7 1700000000000
no type at all
untyped_one{a="say \\"}\\" ,",} NaN
"""
ROUTER = """\
# TYPE smg_requests_total counter
smg_requests_total{route="/generate"} 12
# TYPE sglang:num_running_reqs counter
sglang:num_running_reqs 5
"""


@contextmanager
def server(page, key=None, status=200, location=""):
    """Serves a page, to those who show the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            shown = self.headers.get("Authorization")
            right = self.path == "/metrics" and shown == (f"Bearer {key}" if key else None)
            self.send_response(status if right else 401)
            self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(page if isinstance(page, bytes) else page.encode())

        def log_message(self, format, *args): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}/metrics"
        made.shutdown()


def test_engines_and_routers_stand_on_the_page_each_with_its_labels(sink, monkeypatch):
    monkeypatch.setattr(metrics_pages, "_TIMEOUT_S", 120)
    sink.write("train", 0, {"train/loss": 0.5})
    with ExitStack() as stack:
        engines = [stack.enter_context(server(ENGINE % n, key="s3cret")) for n in (3, 4)]
        pages = [MetricsPage(url, {"model": 'a"b', "engine": str(n)}) for n, url in enumerate(engines)]
        router = stack.enter_context(server(ROUTER, key="s3cret"))
        pages.append(MetricsPage(router, {"model": "c", "router": "host:3000"}))
        with sink.carrying(lambda: pages, "s3cret"):
            page = _ask(sink.port)
        found = _values(page)
    for n, url in enumerate(engines):
        labels = 'a"b', str(n)
        assert found["slime_up", *labels, url] == 1
        assert found["sglang:num_running_reqs", *labels, "tiny", "x"] == 3 + n
        assert [found["sglang:latency_seconds_bucket", *labels, le] for le in ("0.5", "+Inf")] == [1, 2]
        assert found["sglang:latency_seconds_sum", *labels] == 0.15
        assert found["sglang:latency_seconds_count", *labels] == 2
        assert found["sglang:generation_tokens_total", *labels] == 7
        assert ("untyped_one", *labels, 'say "}" ,') in found
    assert found["slime_up", "c", "host:3000", router] == 1
    assert found["smg_requests_total", "c", "host:3000", "/generate"] == 12
    assert '# HELP sglang:latency_seconds Latency, "in" seconds\\n\n' in page
    assert 'exported_model="x"' in page and "s3cret" not in page
    assert ("sglang:num_running_reqs", "c", "host:3000") not in found  # of another type than the others
    assert not any(name.startswith("python_") for name, *_ in found)
    assert [labels for name, *labels in found if name == "process_open_fds"] == [[]]  # the driver's
    assert found["slime_train_loss", "train/loss"] == 0.5
    assert "slime_up" not in _ask(sink.port)


def test_servers_that_give_no_page_are_down_and_hold_up_nobody(sink, monkeypatch):
    monkeypatch.setattr(metrics_pages, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(metrics_pages, "_LONGEST", 1000)
    with ExitStack() as stack:
        serves = stack.enter_context(server("x 1\n"))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        urls = {
            "refuses": stack.enter_context(server("", key="another")),
            "off": stack.enter_context(server("", status=404)),
            "elsewhere": stack.enter_context(server("", status=302, location=serves)),
            "long": stack.enter_context(server("x 1\n" * 1000)),
            "no text": stack.enter_context(server(b"\xff\xfe")),
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}/metrics",
            "gone": f"http://127.0.0.1:{free_port()}/metrics",
        }
        pages = [MetricsPage(url, {"engine": name}) for name, url in urls.items()]
        with sink.carrying(lambda: pages, None):
            found = _values(_ask(sink.port))
    assert {name: found["slime_up", name, url] for name, url in urls.items()} == dict.fromkeys(urls, 0)


def test_while_nobody_knows_which_engines_there_are_the_page_has_the_rest(sink):
    sink.write("train", 0, {"train/loss": 0.5})

    def lost():
        raise RuntimeError("the rollout manager is gone")

    with sink.carrying(lost, None):
        found = _values(_ask(sink.port))
    assert found["slime_train_loss", "train/loss"] == 0.5 and not any("slime_up" in key for key in found)


@pytest.mark.parametrize(
    "line", ["x 1_0", "x{a=b} 1", 'x{a="b" 1', "x", 'x{a="b"c="d"} 1', "1x 1", "x 1 2 3", "#", "x abc"]
)
def test_what_is_no_sample_is_left_out(line):
    assert merged("y 1\n", [({"engine": "0"}, f"{line}\ny 2\n")]) == (
        '# TYPE y untyped\ny 1\ny{engine="0"} 2\n'
    )
