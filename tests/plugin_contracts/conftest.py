"""What is checked: the built-ins or, with ``--plugin-module my.module``, the functions of a module."""

import pytest

from tests.plugin_contracts.contracts import cases

# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plugin-module",
        action="append",
        metavar="MODULE",
        help="check the hooks of this module, recognised by their names, in place of the built-ins",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each function that a contract holds for."""
    if {"contract", "path"} <= set(metafunc.fixturenames):
        modules = metafunc.config.getoption("--plugin-module", default=None) or []
        found = list(cases(modules))
        option = getattr(metafunc.function, "only", None)
        params = [case for case in found if option in (None, case.values[0].option)]
        metafunc.parametrize(("contract", "path"), params)
