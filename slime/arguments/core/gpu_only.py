"""Options that say how SGLang uses its GPUs. The embedded engine goes without, so one script runs on both."""

import re
from collections.abc import Sequence

from slime.arguments.core.absent_sglang import split_options

_NAMES = (
    r"mem-fraction-static|max-prefill-tokens|page-size|schedule-policy|schedule-conservativeness|ep-size",
    r"(prefill-|decode-|mm-|)attention-backend|sampling-backend|(fp8|fp4|bf16)-gemm-backend",
    r"moe-(runner|a2a)-backend|moe-dense-tp-size|deepep-(mode|config)|enable-dp-(attention|lm-head)",
    r"(disable-|)cuda-graph.*|enable-torch-compile|torch-compile-.*|disable-(radix-cache|overlap-schedule)",
    r"disable-(custom-all-reduce|shared-experts-fusion)|enable-(nccl-nvls|symm-mem|two-batch-overlap)",
    r"speculative-.*|watchdog-timeout|decode-log-interval|sleep-on-idle|num-continuous-decode-steps",
)
GPU_ONLY = re.compile(f"--sglang-({'|'.join(_NAMES)})")


def without_gpu_only(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that no parser took, without these options, and a note for each of them."""
    rest: list[str] = []
    notes = []
    for option in split_options(words):
        name = option[0].partition("=")[0]
        if GPU_ONLY.fullmatch(name):
            notes.append(f"{name}: has no effect, the embedded engine has no such option")
        else:
            rest += option
    return rest, notes
