"""Fetches weights to an engine's machine for a server that cannot do so itself.

    python -m slime.weight_sync.versions.puller --port 15007 --local-checkpoint-dir /dev/shm/weights

It answers ``POST /pull_weights`` with the directory of a whole checkpoint, which a server loads by
SGLang's own ``/update_weights_from_disk``.
"""

import argparse
import hmac
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeGuard

from slime.utils.addresses import is_loopback
from slime.utils.same_site import FOREIGN, is_foreign
from slime.utils.stores import bad_url, is_url, shown
from slime.weight_sync.versions.local import pull

_MAX_BYTES = 64 * 1024
_READ_TIMEOUT_S = 30.0


class PullServer(ThreadingHTTPServer):
    """
    Args:
        local: the directory to which it fetches, and no other.
        api_key: that requests have to bring as a bearer token, if there is one.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, local: Path, api_key: str | None) -> None:
        super().__init__((host, port), _Handler)
        self.host, self.local, self.api_key = host, local, api_key

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request."""
        try:
            local, source, version = asked(body)
            if local != self.local:
                raise ValueError(f"local_checkpoint_dir {local} (wanted: {self.local})")
            path = pull(source, local, version)
        except (ValueError, OSError) as error:
            return 400, {"success": False, "message": str(error)}
        return 200, {"success": True, "message": f"Version {version} is there.", "path": str(path)}


class _Handler(BaseHTTPRequestHandler):
    server: PullServer
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(200, {"status": "ok"}) if self.path == "/health" else self._answer(404, {})

    def do_POST(self) -> None:
        if self.path != "/pull_weights":
            self._answer(404, {"success": False, "message": f"{self.path}: not here"})
        elif is_foreign(self.headers.get("Host", ""), self.headers.get("Origin", ""), self.server.host):
            self._answer(403, FOREIGN)
        elif not self._has_key():
            self._answer(401, {"success": False, "message": "wrong or missing API key"})
        else:
            self._answer(*self._pulled())

    def _pulled(self) -> tuple[int, dict[str, Any]]:
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 < length <= _MAX_BYTES:
                raise ValueError(f"{length} bytes (wanted: at most {_MAX_BYTES})")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError("wanted a JSON object")
        except (ValueError, RecursionError) as error:
            return 400, {"success": False, "message": f"body: {error}"}
        return self.server.answer(body)

    def _has_key(self) -> bool:
        key = self.server.api_key
        given = self.headers.get("Authorization", "")
        return key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        print(f"{self.address_string()} {format % args}", flush=True)


def asked(body: dict[str, Any]) -> tuple[Path, str, int]:
    """Local directory, source and version of a request.

    Raises:
        ValueError: one is missing, or no absolute path; the source may be a URL.
    """
    version = body.get("target_version")
    if not isinstance(version, int) or version < 0:
        raise ValueError(f"target_version {version!r} (wanted: a number)")
    local, source = body.get("local_checkpoint_dir"), body.get("source_dir")
    if isinstance(source, str) and is_url(source):
        if reason := bad_url(source):
            raise ValueError(f"source_dir {shown(source)}: {reason}")
    elif not _is_from_root(source):
        raise ValueError(f"source_dir {source!r} (wanted: an absolute path, or a URL)")
    if not _is_from_root(local):
        raise ValueError(f"local_checkpoint_dir {local!r} (wanted: an absolute path)")
    return Path(local), str(source), version


def _is_from_root(path: Any) -> TypeGuard[str]:
    return isinstance(path, str) and Path(path).is_absolute()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("slime.weight_sync.versions.puller")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--local-checkpoint-dir", type=Path, required=True)
    parser.add_argument("--api-key")
    options = parser.parse_args(argv)
    if options.api_key is None and not is_loopback(options.host):
        parser.error(f"--host {options.host}: an API key is required beyond loopback")
    server = PullServer(options.host, options.port, options.local_checkpoint_dir, options.api_key)
    server.serve_forever()


if __name__ == "__main__":
    main()
