"""Functions that a hook's flag may name accept the call that the framework makes.

Check a function of your own:  SLIME_CONTRACT_CUSTOM_RM_PATH=my.rewards.score pytest tests/plugin_contracts
"""

import inspect
import os

import pytest

from slime.rollout.data_source import DataSource
from slime.utils.misc import load_function
from tests.plugin_contracts.contracts import CONTRACTS, Contract


def cases():
    for contract in CONTRACTS:
        own = os.environ.get(contract.variable)
        for path in [own] if own else contract.functions:
            yield pytest.param(contract, path, id=f"{contract.option}={path}")


def check_signature(contract: Contract, function):
    keywords = dict.fromkeys(contract.keywords)
    inspect.signature(function).bind(*contract.positional, **keywords)
    if contract.is_async is not None:
        assert inspect.iscoroutinefunction(function) is contract.is_async


@pytest.mark.parametrize(("contract", "path"), cases())
def test_the_function_accepts_the_call(contract, path):
    check_signature(contract, load_function(path))


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.option)
def test_a_function_with_one_parameter_too_few_is_found_out(contract):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in contract.positional[1:]]

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)
    with pytest.raises(TypeError):
        check_signature(contract, function)


@pytest.mark.parametrize(
    ("contract", "path"), [case for case in cases() if case.values[0].option == "data-source-path"]
)
def test_a_data_source_has_all_methods(contract, path):
    source_class = load_function(path)
    for name in DataSource.__abstractmethods__:
        assert callable(getattr(source_class, name))
