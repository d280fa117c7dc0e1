"""``sglang.launch_server`` in processes that find no megatron-core.

    python -m slime.backends.sglang_utils.launch_server --model-path ...

SGLang imports megatron-core where it is installed, for its debugging alone. That import sets
``torch_memory_saver.hook_mode`` to "torch" (``megatron.core.inference.contexts.dynamic_context``), with which
no CUDA graph can be captured whose memory is released: an engine beside a trainer ends while it starts.
SGLang's subprocesses import this module again before their own work, as ``multiprocessing`` does with the
main one.
"""

import runpy
import sys

_SERVER = "sglang.launch_server"


def hide_megatron() -> None:
    """Makes ``import megatron`` raise ImportError in this process."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # what the import system takes for "not there"


def main() -> None:
    """Becomes SGLang's server, but stays the main module, which subprocesses import."""
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=False)


if __name__ in ("__main__", "__mp_main__"):
    hide_megatron()
if __name__ == "__main__":
    main()
