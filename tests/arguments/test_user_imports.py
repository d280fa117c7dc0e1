"""Imports inside functions of plug-ins are looked at before anything starts."""

import importlib

import pytest

from slime.arguments.validate.user_code import why_unusable

PLUG = "async def reward(args, sample, **kwargs):\n    {}\n    return 1.0\n"
_count = iter(range(1000))


@pytest.fixture
def plug(tmp_path, monkeypatch):
    """Writes a package and says what is wrong with its function ``reward``."""
    monkeypatch.syspath_prepend(tmp_path)

    def check(source, **others):
        package = tmp_path / f"late_imports_{next(_count)}"
        package.mkdir()
        for name, text in {"plug": source, "__init__": "", **others}.items():
            (package / f"{name}.py").write_text(text)
        importlib.invalidate_caches()  # a directory may change twice within a tick of its clock
        return why_unusable(f"{package.name}.plug.reward")

    return check


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from slime.agent.none import x", "plug.py:2 imports slime.agent.none, which does not exist"),
        ("import slime.utils.none", "plug.py:2 imports slime.utils.none, which does not exist"),
        (
            "from slime.utils.types import Sample, Sampl",
            "plug.py:2 imports Sampl from slime.utils.types, which has no such name",
        ),
        (
            "if args:\n        with open('x'):\n            from slime.utils import nothing",
            "plug.py:4 imports nothing from slime.utils, which has no such name",
        ),
        (
            "try:\n        pass\n    except ImportError:\n        import slime.none",
            "plug.py:5 imports slime.none, which does not exist",
        ),
        (
            "def inner():\n        import slime.one, slime.two",
            "plug.py:3 imports slime.one, which does not exist; plug.py:3 imports slime.two, "
            "which does not exist",
        ),
    ],
)
def test_a_late_import_of_what_does_not_exist_is_named(plug, line, reason):
    assert plug(PLUG.format(line)) == reason


@pytest.mark.parametrize(
    "line",
    [
        "from slime.utils.types import Sample",
        "from slime.utils import types, http_utils",
        "import slime.utils.types as types",
        "from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp",
        "from slime.backends.megatron_utils import loss",
        "from slime.arguments.registry import CONFIG_GROUPS",
        "import a_package_that_nobody_has.indeed",
        "try:\n        from slime.none import x\n    except ImportError:\n        x = None",
        "try:\n        if 1:\n            import slime.no\n    except (KeyError, ImportError):\n        pass",
        "try:\n        import slime.none\n    except:\n        pass",
        "with suppress(ImportError):\n        import slime.none",
    ],
)
def test_what_exists_is_foreign_or_is_provided_for_is_no_fault(plug, line):
    assert plug(PLUG.format(line)) is None


def test_the_modules_that_a_plug_in_uses_are_looked_at_too(plug):
    helper = "def search():\n    import slime.none\n"
    reason = "helper.py:2 imports slime.none, which does not exist"
    assert plug("from .helper import search\n" + PLUG.format("pass"), helper=helper) == reason
    middle = "from . import helper\n"
    assert plug("from .middle import helper\n" + PLUG.format("pass"), middle=middle, helper=helper) == reason


def test_reading_a_plug_in_runs_nothing_of_its_functions(plug):
    assert plug(PLUG.format("raise SystemExit")) is None


def test_functions_of_ours_and_of_no_file_are_not_read():
    assert why_unusable("slime.rollout.sglang_rollout.generate") is None
    assert why_unusable("math.sqrt") is None
