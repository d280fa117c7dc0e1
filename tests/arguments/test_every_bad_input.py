"""Every flag, file and plug-in point refuses what it cannot take, in one line that names it.

All in this process: what can be known before a process starts is known before.
"""

import subprocess
import sys

import pytest

from tests.arguments.bad_inputs import COMMAND_LINES, CONFIG_VALUES, MODELS, by_flag
from tests.each import hold_each

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("os.fork", start)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of the test's own, from which plug-ins can be imported."""
    path = tmp_path / "site"
    (path / "directory").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(path), *sys.path])
    return path


def write_files(site, files):
    """In place of those of the case before."""
    for path in site.iterdir():
        if path.is_file():
            path.unlink()
    for name, content in files.items():
        (site / name).write_bytes(content.replace(b"{site}", str(site).encode()))
    sys.path_importer_cache.pop(str(site), None)  # what is known of other places stays true


def test_there_are_enough_of_them():
    assert len(COMMAND_LINES) + len(MODELS) + len(CONFIG_VALUES) >= 3100


@pytest.mark.parametrize("cases", by_flag().values(), ids=by_flag())
def test_every_bad_input_of_a_flag_is_named(words, refusal, site, cases):
    def filled(value):
        if isinstance(value, list):
            return [filled(item) for item in value]
        return value.replace("{site}", str(site)) if isinstance(value, str) else value

    def check(case):
        write_files(site, case.files)
        line = words(**{name: filled(value) for name, value in case.flags.items()})
        message = refusal([*line, *map(filled, case.words)])
        assert message.startswith(filled(case.said)), f"said {message!r}, wanted {filled(case.said)!r} first"
        assert case.named in message, f"said {message!r}, wanted {case.named!r} in it"

    hold_each(cases, check, name=lambda case: case.about)


@pytest.mark.parametrize(
    ("flag", "file"), dict.fromkeys((flag, file) for flag, file, *_ in MODELS), ids=": ".join
)
def test_a_bad_file_of_a_model_is_named(words, refusal, altered_checkpoint, flag, file):
    def check(case):
        path = altered_checkpoint()
        (path / file).write_bytes(case[3])
        message = refusal(words(**{flag: path}))
        assert message.startswith(f"--{flag.replace('_', '-')}"), f"said {message!r}"
        assert str(path) in message, f"said {message!r}, wanted {str(path)!r} in it"

    hold_each(
        [case for case in MODELS if case[:2] == (flag, file)],
        check,
        name=lambda case: f"{flag}: {file}: {case[2]}",
    )


@pytest.mark.parametrize("name", dict(CONFIG_VALUES))
def test_every_bad_value_of_a_field_of_config_json_is_named(words, refusal, altered_checkpoint, name):
    def check(value):
        path = altered_checkpoint(**{name: value})
        message = refusal(words(hf_checkpoint=path))
        assert message.startswith(f"--hf-checkpoint {path}: "), f"said {message!r}"
        assert name in message, f"said {message!r}"

    hold_each(
        [value for field, value in CONFIG_VALUES if field == name],
        check,
        name=lambda value: f"{name}: {value!r}",
    )
