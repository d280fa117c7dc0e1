"""In place of the library that frees GPU memory and takes it back: on a CPU nothing is freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def configure_subprocess() -> Iterator[None]:
    yield


class _MemorySaver:
    hook_mode = "preload"

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        yield

    @contextmanager
    def cuda_graph(self, **options: Any) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def pause(self, tag: str | None = None) -> None: ...

    def resume(self, tag: str | None = None) -> None: ...


torch_memory_saver = _MemorySaver()
