"""What a signal handler sets, and the main thread waits for."""

import os
import select
from contextlib import suppress


class SignalFlag:
    """Stays set. In place of `threading.Event`, whose lock the main thread holds while it begins to wait: a
    handler that runs then and sets it waits for that lock for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(BlockingIOError):  # nobody has waited for long
            os.write(self._writer, b".")

    def wait(self, seconds: float) -> bool:
        """Returns at once when it is set, before or meanwhile; whether it is."""
        if not self._is_set:
            select.select([self._reader], [], [], seconds)
        return self._is_set

    def __del__(self) -> None:
        for end in (self._reader, self._writer):
            with suppress(OSError):
                os.close(end)
