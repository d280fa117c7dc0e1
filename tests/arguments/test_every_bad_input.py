"""Every flag, file and plug-in point refuses what it cannot take, in one line that names it.

All in this process: what can be known before a process starts is known before.
"""

import subprocess

import pytest

from tests.arguments.bad_inputs import COMMAND_LINES, CONFIG_VALUES, MODELS

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
    monkeypatch.syspath_prepend(path)
    return path


def test_there_are_enough_of_them():
    assert len(COMMAND_LINES) + len(MODELS) + len(CONFIG_VALUES) >= 300


@pytest.mark.parametrize("case", COMMAND_LINES, ids=lambda case: case.about)
def test_a_bad_input_is_named(words, refusal, site, case):
    for name, content in case.files.items():
        (site / name).write_bytes(content.replace(b"{site}", str(site).encode()))

    def filled(value):
        if isinstance(value, list):
            return [filled(item) for item in value]
        return value.replace("{site}", str(site)) if isinstance(value, str) else value

    line = words(**{name: filled(value) for name, value in case.flags.items()})
    message = refusal([*line, *map(filled, case.words)])
    assert message.startswith(filled(case.said))
    assert case.named in message


@pytest.mark.parametrize(
    ("flag", "file", "content"),
    [
        pytest.param(flag, file, content, id=f"{flag}: {file}: {about}")
        for flag, file, about, content in MODELS
    ],
)
def test_a_bad_file_of_a_model_is_named(words, refusal, altered_checkpoint, flag, file, content):
    path = altered_checkpoint()
    (path / file).write_bytes(content)
    message = refusal(words(**{flag: path}))
    assert message.startswith(f"--{flag.replace('_', '-')}")
    assert str(path) in message


@pytest.mark.parametrize(("name", "value"), CONFIG_VALUES)
def test_a_bad_value_of_config_json_is_named(words, refusal, altered_checkpoint, name, value):
    path = altered_checkpoint(**{name: value})
    message = refusal(words(hf_checkpoint=path))
    assert message.startswith(f"--hf-checkpoint {path}: ")
    assert name in message
