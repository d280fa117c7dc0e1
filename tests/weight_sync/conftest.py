"""Where versions of weights are published and read."""

import pytest

from tests.weight_sync.publisher import Publisher


@pytest.fixture
def publisher(tmp_path):
    (tmp_path / "shared").mkdir()
    return Publisher(tmp_path / "shared")


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"
