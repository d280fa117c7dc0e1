import signal

import pytest

from slime.ray import ending
from slime.ray.ending import exit_on_signal, exit_status


@pytest.fixture
def no_signal_yet(monkeypatch):
    """Handlers and what was received are as before afterwards."""
    monkeypatch.setattr(ending, "_signals", [])
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("no_signal_yet")
def test_a_signal_gives_the_status_whatever_exit_a_wait_of_ray_makes_of_it():
    assert exit_status(SystemExit(3)) == 3
    with pytest.raises(SystemExit) as exit_:
        exit_on_signal(signal.SIGTERM, None)
    assert exit_.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert exit_status(SystemExit(1)) == 143


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (KeyboardInterrupt(), 130), (SystemExit(), 0), (SystemExit("text"), 1), (OSError(), 1)],
)
def test_the_status_of_other_ends(error, status, no_signal_yet):
    assert exit_status(error) == status
