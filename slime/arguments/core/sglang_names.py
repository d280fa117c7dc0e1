"""What the options of earlier versions of SGLang's server, from 0.5.10 on, are called by now.

Read off the ``ServerArgs`` of each version up to 0.5.23, and off what deprecated options say there. Names are
without the prefix ``--sglang-`` that they have on our command line.
"""

from collections.abc import Collection, Sequence

from slime.arguments.core.errors import UsageError

# Since which version the name is gone, and the name (perhaps with a value) that means the same.
RENAMED: dict[str, tuple[str, str]] = {
    "cuda-graph-bs": ("0.5.20", "cuda-graph-bs-decode"),
    "cuda-graph-max-bs": ("0.5.20", "cuda-graph-max-bs-decode"),
    "disable-piecewise-cuda-graph": ("0.5.20", "cuda-graph-backend-prefill disabled"),
    "enable-breakable-cuda-graph": ("0.5.20", "cuda-graph-backend-prefill breakable"),
    "piecewise-cuda-graph-tokens": ("0.5.20", "cuda-graph-bs-prefill"),
    "piecewise-cuda-graph-max-tokens": ("0.5.20", "cuda-graph-max-bs-prefill"),
    "mamba-scheduler-strategy": ("0.5.20", "mamba-radix-cache-strategy"),
    "nsa-prefill-backend": ("0.5.20", "dsa-prefill-backend"),
    "nsa-decode-backend": ("0.5.20", "dsa-decode-backend"),
    "enable-nsa-prefill-context-parallel": ("0.5.20", "enable-prefill-cp"),
    "enable-dsa-prefill-context-parallel": ("0.5.20", "enable-prefill-cp"),
    "enable-prefill-context-parallel": ("0.5.20", "enable-prefill-cp"),
    "enable-gdn-replayssm-spec": ("0.5.20", "enable-linear-replayssm-spec"),
    "speculative-dflash-draft-window-size": ("0.5.20", "speculative-draft-window-size"),
    "stream-output": ("0.5.20", "incremental-streaming-output"),
    "enable-deepep-waterfill": ("0.5.16", "enable-waterfill"),
    "elastic-ep-rejoin": ("0.5.21", "elastic-ep-join-mode recover"),
    "keep-mm-feature-on-device": ("0.5.21", "mm-feature-transport cuda_ipc"),
}
_ALWAYS = "leave it out: it is so without a switch"
_WITHOUT = "leave it out: SGLang has no such feature any more"
_PYTHON = "leave it out: it is for callers in Python only"
_CP = "--sglang-cp-strategy zigzag for in-seq-split, interleave for round-robin-split"
_COMPILER = "leave it out: the backend that it was for is gone"
_DOUBLE_SPARSITY = (
    *("enable-double-sparsity", "ds-channel-config-path", "ds-heavy-channel-num", "ds-heavy-channel-type"),
    *("ds-heavy-token-num", "ds-sparse-decode-threshold"),
)
# Since which version the name is gone, and what to write instead.
GONE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_DOUBLE_SPARSITY, ("0.5.11", _WITHOUT)),
    "multi-item-scoring-delimiter": ("0.5.11", "--sglang-enable-mis"),
    "enable-nan-detection": ("0.5.13", "SGLANG_SPEC_NAN_DETECTION=1 in the environment"),
    "record-nolora-graph": ("0.5.13", _WITHOUT),
    "debug-tensor-dump-inject": ("0.5.14", _WITHOUT),
    "enable-piecewise-cuda-graph": ("0.5.14", _ALWAYS),
    "hybrid-kvcache-ratio": ("0.5.14", "--sglang-swa-full-tokens-ratio"),
    "optimistic-prefill-retries": ("0.5.16", "--sglang-optimistic-prefill-attempts"),
    "torchao-config": ("0.5.18", "--sglang-quantization"),
    "collect-tokens-histogram": ("0.5.20", "--sglang-enable-metrics, which collects them"),
    "enable-expert-distribution-metrics": ("0.5.20", "--sglang-expert-balancedness-report-mode"),
    "prefill-round-robin-balance": ("0.5.20", "leave it out: it has had no effect since 0.5.10"),
    "custom-sigquit-handler": ("0.5.20", _PYTHON),
    "stat-loggers": ("0.5.20", _PYTHON),
    "nsa-prefill-cp-mode": ("0.5.20", _CP),
    "dsa-prefill-cp-mode": ("0.5.20", _CP),
    "prefill-cp-mode": ("0.5.20", _CP),
    "enforce-piecewise-cuda-graph": ("0.5.20", "--sglang-cuda-graph-backend-prefill breakable"),
    "piecewise-cuda-graph-compiler": ("0.5.20", _COMPILER),
    "cuda-graph-tc-compiler": ("0.5.22", _COMPILER),
    "speculative-skip-dp-mlp-sync": ("0.5.23", _ALWAYS),
}
PREFIX = "--sglang-"


def with_current_names(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a command line with SGLang's names of today, and a note for each that was another one.

    Args:
        options: the option strings that the server has; a name among them is what it was meant to be.
    """
    current, notes = [], []
    for word in words:
        name, equals, value = word.partition("=")
        since, now = RENAMED.get(name.removeprefix(PREFIX), ("", ""))
        new, *values = f"{PREFIX}{now}".split()
        if not name.startswith(PREFIX) or name in options or new not in options:
            current.append(word)
            continue
        shown = " ".join([new, *values])
        notes.append(f"{name}: is called {shown} since SGLang {since}, and taken as that")
        current += [f"{new}{equals}{value}", *values]
    return current, notes


def refuse_gone(name: str) -> None:
    """Raises UsageError if an unknown option is one that SGLang had once."""
    if not name.startswith(PREFIX):
        return
    bare = name.removeprefix(PREFIX)
    since, instead = GONE.get(bare) or RENAMED.get(bare) or ("", "")
    if bare in RENAMED:
        instead = PREFIX + instead
    if since:
        raise UsageError(f"{name}: SGLang has no such option since {since} (wanted: {instead})")
