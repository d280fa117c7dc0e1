"""URLs in prompts are fetched from hosts that may be asked, and from the address that was looked at."""

import io
import socket
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from slime.utils import allowed_hosts, remote_files
from slime.utils.allowed_hosts import HostRefused, bad_entries, is_listed, require_public, tell_hosts
from slime.utils.processing_utils import process_vision_info
from slime.utils.remote_files import FetchError, fetch
from tests.each import hold_each

LOCAL = ["127.0.0.1"]
FLAG = "--allowed-hosts"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = self.server.answers
        status, headers, body = answers.get(self.path, (404, {}, b""))
        self.server.asked.append((self.path, self.headers["Host"]))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.asked, server.answers = [], {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def names(monkeypatch):
    """Names of hosts to the addresses that each look-up finds, one after the other; the last one stays."""
    known, real = {}, socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        found = known.get(host)
        address = (found.pop(0) if len(found) > 1 else found[0]) if found else host
        return real(address, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_content_is_fetched_and_redirects_are_followed(server):
    server.answers |= {"/a?b=c": (302, {"Location": "/d"}, b""), "/d": (200, {}, b"content")}
    assert fetch(f"{server.url}/a?b=c", LOCAL, "image") == b"content"
    assert [path for path, _ in server.asked] == ["/a?b=c", "/d"]


def _not_public(address):
    with pytest.raises(HostRefused, match=rf"image: host h is at {address}.* \(wanted: {FLAG} h\)"):
        require_public([address], "h", "image")


def test_only_public_addresses_are_asked_without_a_list():
    local = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 240.0.0.1"
    v6 = "::1 :: fe80::1%eth0 fd00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe"
    hold_each([*local.split(), *v6.split(), "2002:7f00:1::", "::7f00:1"], _not_public)
    require_public(["8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808"], "h", "image")


def _refused_in_any_spelling(server, host):
    with pytest.raises(HostRefused, match=rf"image: host .* no public address \(wanted: {FLAG}"):
        fetch(f"http://{host}:{server.server_port}/d", None, "image")


def test_loopback_is_refused_in_any_spelling_before_it_is_asked(server):
    hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "017700000001", "127.1", "[::ffff:127.0.0.1]"]
    hold_each(hosts, partial(_refused_in_any_spelling, server))
    assert server.asked == []


def test_a_name_with_one_private_address_is_refused(server, monkeypatch):
    found = [(0, 0, 0, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(HostRefused, match=r"host two is at 10\.0\.0\.1"):
        fetch("http://two/", None, "image")


def test_the_address_that_was_looked_at_is_connected_to(server, names, monkeypatch):
    """A name that resolves to a public address and then to this machine gets no request here."""
    names["rebound.example"] = ["8.8.8.8", "127.0.0.1"]
    connected = []

    def connect(address, timeout):
        connected.append(address)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(FetchError, match=r"image: rebound\.example: refused"):
        fetch(f"http://rebound.example:{server.server_port}/d", None, "image")
    assert connected == [("8.8.8.8", server.server_port)]


def test_a_listed_name_is_asked_by_its_name_wherever_it_is(server, names):
    names["images.example"] = ["127.0.0.1"]
    server.answers["/d"] = (200, {}, b"content")
    url = f"http://images.example:{server.server_port}/d"
    assert fetch(url, ["*.example"], "image") == b"content"
    assert server.asked == [("/d", f"images.example:{server.server_port}")]


def test_a_redirect_is_looked_at_as_the_first_url_was(server, monkeypatch):
    elsewhere = f"http://localhost:{server.server_port}/d"
    server.answers |= {"/a": (302, {"Location": elsewhere}, b""), "/d": (200, {}, b"secret")}
    with pytest.raises(HostRefused, match=rf"image: host localhost:\d+ is not in {FLAG} \(127\.0\.0\.1\)"):
        fetch(f"{server.url}/a", LOCAL, "image")
    real, first = remote_files.require_public, []
    monkeypatch.setattr(remote_files, "require_public", lambda *a: real(*a) if first else first.append(a))
    with pytest.raises(HostRefused, match="host localhost is at"):
        fetch(f"{server.url}/a", None, "image")
    server.answers["/b"] = (302, {"Location": "file:///etc/passwd"}, b"")
    with pytest.raises(HostRefused, match="wanted: http://HOST"):
        fetch(f"{server.url}/b", LOCAL, "image")
    assert [path for path, _ in server.asked] == ["/a", "/a", "/b"]


def test_what_is_too_much_or_not_there_is_an_error_that_names_the_host(server, monkeypatch):
    monkeypatch.setattr(remote_files, "MAX_BYTES", 4)
    server.answers |= {"/long": (200, {}, b"12345"), "/round": (302, {"Location": "/round"}, b"")}
    server.answers["/cut"] = (200, {"Content-Length": "4"}, b"123")
    for path, why in {"/long": "over 4 bytes", "/round": "redirects more", "/cut": "", "/no": "404"}.items():
        with pytest.raises(FetchError, match=rf"^image: 127\.0\.0\.1.*{why}"):
            fetch(server.url + path, LOCAL, "image")


def test_a_server_that_never_comes_to_an_end_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        # Each byte comes in time; the head has no end.
        ended = threading.Event()
        thread = threading.Thread(target=_drip, args=(listening, ended))
        thread.start()
        with pytest.raises(FetchError, match=r"image: 127\.0\.0\.1: takes too long"):
            fetch(url, LOCAL, "image", timeout_s=0.3)
        ended.set()
        thread.join()


def _drip(listening, ended):
    connection, _ = listening.accept()
    with connection:
        while not ended.wait(0.01):
            try:
                connection.sendall(b"H")
            except OSError:
                return


def _listed(row):
    entries, url, expected = row
    assert is_listed(url, entries.split()) is expected


def test_entries_name_hosts_with_their_ports_and_domains():
    table = [
        ("judge", "http://judge:8000/score", True),
        ("judge", "http://JUDGE./", True),
        ("judge:443", "https://judge/", True),
        ("judge:80", "https://judge/", False),
        ("judge:81 judge:82", "http://judge:82", True),
        ("*.example.com", "http://a.b.example.com", True),
        ("*.example.com", "http://example.com", False),
        ("*.example.com", "http://badexample.com", False),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("judge", "http://judge@evil/", False),
        ("judge", "http://judge.evil/", False),
    ]
    hold_each(table, _listed)
    bad = ["", "http://judge", "judge/", "*", "a.*.b", "judge:", "judge:x", "judge:70000", "me@judge", "a b"]
    assert len(list(bad_entries(bad))) == len(bad) and not list(bad_entries(["*.b.c:80", "[::1]", "a"]))


def test_images_and_videos_of_a_prompt_are_fetched_before_a_library_sees_them(server, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    picture = io.BytesIO()
    image.new("RGB", (3, 2)).save(picture, format="PNG")
    server.answers |= {"/i": (200, {}, picture.getvalue()), "/v": (200, {}, b"video")}
    seen = []

    def read(messages):
        parts = messages[0]["content"]
        with open(parts[1]["video"], "rb") as file:
            seen.extend([parts[0]["image"].size, file.read(), parts[2]["video"][0].size, *parts[3:]])
        return "images", "videos"

    monkeypatch.setitem(sys.modules, "qwen_vl_utils", SimpleNamespace(process_vision_info=read))
    rest = [
        {"image": "file:///a.png"},
        {"image": "b.png"},
        {"type": "text", "text": "http://169.254.169.254/"},
    ]
    urls = [f"{server.url}/i", f"{server.url}/v"]
    parts = [{"type": "image", "image": urls[0]}, {"video": urls[1]}, {"video": [urls[0]]}, *rest]
    prompt = [{"role": "user", "content": parts}]
    assert process_vision_info(prompt, None, LOCAL) == {"images": "images", "videos": "videos"}
    assert seen == [(3, 2), b"video", (3, 2), *rest] and parts[0]["image"] == urls[0]
    monkeypatch.setattr(allowed_hosts, "_told", {})
    with pytest.raises(
        HostRefused, match=r"image of a prompt: this process was not told where URLs may lead"
    ):
        process_vision_info(prompt, None)
    tell_hosts(None)
    with pytest.raises(HostRefused, match=rf"image of a prompt: host 127\.0\.0\.1 .* \(wanted: {FLAG} 127"):
        process_vision_info(prompt, None)
    tell_hosts(["judge"])
    with pytest.raises(HostRefused, match=rf"image of a prompt: host 127\S+ is not in {FLAG} \(judge\)"):
        process_vision_info(prompt, None)
    tell_hosts(LOCAL)
    assert process_vision_info(prompt, None) == {"images": "images", "videos": "videos"}
    for url in ("rtsp://h/", "FTP://h/", "concat:http://h/"):
        with pytest.raises(HostRefused, match="video of a prompt: a URL of the kind"):
            process_vision_info([{"role": "user", "content": [{"video": url}]}], None)
