"""One ordinary server for all tests of the protocol; tests leave it idle and as they found it."""

import pytest

from tests.engines.embedded import Server, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, make_checkpoint(path)


@pytest.fixture(scope="session")
def shared_server(checkpoint):
    flags = ("--enable-memory-saver", "--max-running-requests", "16", "--random-seed", "7")
    server = Server(checkpoint[0], *flags)
    try:
        yield server.wait_ready()
    finally:
        server.stop()
