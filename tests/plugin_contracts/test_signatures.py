"""Functions that a hook's flag may name accept the call that the framework makes.

Check a module of your own:    pytest tests/plugin_contracts --plugin-module my.module
Check a function of any name:  SLIME_CONTRACT_CUSTOM_RM_PATH=my.rewards.score pytest tests/plugin_contracts
"""

import inspect

import pytest

from slime.arguments.validate.user_code import why_unusable
from slime.rollout.base_types import accepted
from slime.rollout.data_source import DataSource
from slime.utils.misc import load_function
from tests.plugin_contracts.contracts import CONTRACTS, Contract, cases, functions_of, only


def check_signature(contract: Contract, function):
    keywords = accepted(function, dict.fromkeys(contract.optional))
    inspect.signature(function).bind(*contract.positional, **dict.fromkeys(contract.keywords), **keywords)
    if contract.is_async is not None:
        assert inspect.iscoroutinefunction(function) is contract.is_async


def test_the_function_accepts_the_call(contract, path):
    check_signature(contract, load_function(path))


def test_what_the_function_imports_when_it_is_called_exists(contract, path):
    assert why_unusable(path) is None


@pytest.mark.parametrize("of", CONTRACTS, ids=lambda contract: contract.option)
def test_a_function_with_one_parameter_too_few_is_found_out(of):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in of.positional[1:]]

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)
    with pytest.raises(TypeError):
        check_signature(of, function)


@only("data-source-path")
def test_a_data_source_has_all_methods(contract, path):
    source_class = load_function(path)
    for name in DataSource.__abstractmethods__:
        assert callable(getattr(source_class, name))


def test_the_functions_of_a_module_are_recognised_by_their_names(monkeypatch):
    for contract in CONTRACTS:
        monkeypatch.delenv(contract.variable, raising=False)
    found = {(case.values[0].option, case.values[1]) for case in cases(["tests.plugin_contracts.recorders"])}
    recorders = "tests.plugin_contracts.recorders."
    assert ("custom-rm-path", recorders + "rm") in found
    assert ("buffer-filter-path", recorders + "buffer_filter") in found
    # Those that take a list, and what the module has imported, are none.
    assert not {path for _, path in found} & {recorders + "group_rm", recorders + "stock_generate"}
    assert len(found) == 12


def test_a_function_of_any_name_is_checked_by_a_variable(monkeypatch):
    monkeypatch.setenv("SLIME_CONTRACT_CUSTOM_RM_PATH", "json.dumps")
    assert [case.values[1] for case in cases() if case.values[0].option == "custom-rm-path"] == ["json.dumps"]
    assert [case.values[1] for case in cases(["tests.plugin_contracts.recorders"])].count("json.dumps") == 1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("no_such_module_anywhere", "No module named"),
        ("tests.plugin_contracts.test_signatures", "has the name of a hook .*custom-rm-path: "),
    ],
)
def test_a_module_without_hooks_is_refused(module, reason):
    with pytest.raises(pytest.UsageError, match=reason):
        functions_of(module)
