"""A served model, and the copies of repositories that launchers run in."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.arguments.conftest import checkpoint  # noqa: F401
from tests.engines.embedded import Server, make_checkpoint


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """``engine.url`` and the ``engine.model`` that it serves, saved at ``engine.path``."""
    path: Path = tmp_path_factory.mktemp("served")
    model = make_checkpoint(path)
    server = Server(path).wait_ready()
    yield SimpleNamespace(url=server.url, model=model, path=path)
    server.stop()
