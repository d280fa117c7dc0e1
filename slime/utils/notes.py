"""What a user should be told once: it is taken, though something else was expected."""

from threading import Lock

_waiting: list[str] = []
_told: set[str] = set()
_lock = Lock()


def note(text: str) -> None:
    """Tell this once in a run; the rollout manager hands it to the driver with its next answer."""
    with _lock:
        if text not in _told:
            _told.add(text)
            _waiting.append(text)


def take_notes() -> list[str]:
    """What was noted in this process since the last call."""
    with _lock:
        found, _waiting[:] = _waiting[:], []
    return found
