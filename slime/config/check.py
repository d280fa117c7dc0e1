"""``--check``: whether a run would start and what it would need."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Look at a command line without running it."""

    check: bool = flag(
        False,
        help="print parameters, layout, batches and the memory of each GPU, and exit; starts nothing and "
        "needs no weights, of --hf-checkpoint no more than its config.json",
    )
    check_gpu_memory_gb: float | None = flag(
        above=0, help="memory of a GPU for --check, in GiB; default that of the GPU here, else 80"
    )
