"""How much memory the cache of keys and values takes."""

import pytest

from slime.backends.embedded_engine.kv_cache import _grown


@pytest.mark.parametrize(
    ("current", "wanted", "size"),
    [(0, 1, 8), (0, 9, 9), (8, 8, 8), (8, 7, 8), (8, 9, 16), (8, 20, 20), (60, 61, 100)],
)
def test_it_doubles_within_its_limits(current, wanted, size):
    assert _grown(current, wanted, first=8, limit=100) == size
