"""Tests under random delays.

    python -m pytest -p tests.plugins.delays --delays SEED tests/router

A test that passes only because somebody is usually fast enough fails with some seed.
`tests.flaky` tries many.
"""

import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.plugins.random_delays import Delays, install

TESTS = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", metavar="SEED", help="random delays in tests and their processes")


def pytest_configure(config: pytest.Config) -> None:
    if (seed := config.getoption("delays")) is not None:
        config.pluginmanager.register(_Delayed(install(seed)), "random delays")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("delays")
    return None if seed is None else f"random delays: --delays {seed}"


class _Delayed:
    """Delays tests, each of them from its own beginning, and their lines."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._delays.start(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._file = str(item.path)
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file == self._file or file.startswith(str(TESTS)) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._delays.wait("line")
        return self._line
