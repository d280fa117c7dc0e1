"""Tests of the nightly tier run where they are asked for: ``-m nightly``."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]
