"""Where versions of weights are published and read, and what transports of a rank alone agree by."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from slime.weight_sync.transports.transport import Transport
from tests.weight_sync.publisher import Publisher


@pytest.fixture
def publisher(tmp_path):
    (tmp_path / "shared").mkdir()
    return Publisher(tmp_path / "shared")


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Transports that no `WeightUpdate` has made agree with nobody."""
    agreement = SimpleNamespace(step=lambda name: nullcontext())
    monkeypatch.setattr(Transport, "agreement", agreement, raising=False)
