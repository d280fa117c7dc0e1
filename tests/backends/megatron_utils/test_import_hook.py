"""What megatron-core is told of packages while it is imported."""

import importlib
import sys

import pytest

from slime.backends.megatron_utils import import_hook


def test_a_package_is_hidden_only_meanwhile_and_only_if_it_is_not_loaded():
    name = "tests.rollout.bad_graders"
    sys.modules.pop(name, None)
    with import_hook._hiding(name), pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    loaded = importlib.import_module(name)
    with import_hook._hiding(name):
        assert importlib.import_module(name) is loaded
    assert sys.modules[name] is loaded
    before = dict(sys.modules)
    with import_hook._hiding(None):
        assert sys.modules == before


def test_one_finder_is_enough(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for _ in range(2):
        import_hook.register()
    assert sum(isinstance(finder, import_hook._MegatronFinder) for finder in sys.meta_path) == 1
