"""One prompt and the response growing behind it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from slime.backends.embedded_engine.adapters import Adapter
from slime.backends.embedded_engine.grammar.constraint import Constraint
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.utils.model_inputs import SequenceInputs

TopLogprobs = list[tuple[float, int]]


class Nucleus(NamedTuple):
    """The tokens that one was drawn among: int32, the likeliest first. And its log-prob among them."""

    ids: np.ndarray
    logprob: float


@dataclass(frozen=True)
class LogprobOptions:
    """Which log-probs a request wants.

    ``prompt_start`` is the first prompt position of interest, or None for response tokens only.
    """

    wanted: bool = False
    prompt_start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass
class Logprobs:
    """Log-probs of a run of tokens: of the tokens, of the likeliest ones, of chosen ids."""

    of_tokens: list[float | None] = field(default_factory=list)
    top: list[TopLogprobs | None] = field(default_factory=list)
    of_ids: list[TopLogprobs | None] = field(default_factory=list)


@dataclass
class VersionSpan:
    """Response tokens ``[start, end)`` were sampled under this weight version."""

    version: str
    start: int
    end: int


class Progress(NamedTuple):
    """One moment of a response: its first ``end`` tokens are there, and whether that is all."""

    end: int
    finished: bool


@dataclass(eq=False)
class Sequence:
    """Written by the engine thread only.

    Other threads may read the lists of output tokens, which only grow. How much of them to show, and
    whether there is a finish reason yet, they take from one ``progress``.
    """

    rid: str
    prompt: SequenceInputs
    params: SamplingParams
    logprob_options: LogprobOptions
    noise_seed: int
    on_progress: Callable[[], None] | None = None
    on_finish: Callable[[], None] | None = None
    output_ids: list[int] = field(default_factory=list)
    settled: int = 0
    """Number of output tokens that are known not to have ended the response."""
    output_logprobs: Logprobs = field(default_factory=Logprobs)
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    """Empty until the whole prompt is computed, then replaced once."""
    finish_reason: dict[str, Any] | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    num_retractions: int = 0
    constraint: Constraint | None = None
    """Where the response is within its grammar; it has seen all output tokens, before a retraction too."""
    routes_from: int | None = None
    """The first token whose experts the response is to tell; None if it need not."""
    routes: list[torch.Tensor] = field(default_factory=list)
    """Experts of all tokens but the newest, in parts ``[n, layers, top-k]``, if the engine records them."""
    tells_mask: bool = False
    """Whether the response tells of ``nuclei`` in the manner of SGLang's ``return_sampling_mask``."""
    nuclei: list[Nucleus] = field(default_factory=list)
    """The nucleus of each output token, if the response is to tell of them in any manner."""
    prompt_hidden: torch.Tensor | None = None
    """``[hidden]`` state of the last prompt token, kept while another sequence may start from it."""

    lora_path: str | None = None
    """The name of the adapter that is asked for."""
    adapter: Adapter | None = None
    """The one that had this name when the engine took the sequence in."""

    def __post_init__(self) -> None:
        self.prompt_ids: list[int] = self.prompt.ids

    @property
    def prompt_key(self) -> tuple[str, bytes]:
        """Equal in sequences of which one may start from another's keys and values."""
        return self.adapter.identity if self.adapter else "", self.prompt.cache_key

    @property
    def needs_nuclei(self) -> bool:
        return self.tells_mask or self.params.tells_nuclei

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.logprob_options.prompt_start is not None and not self.prompt_logprobs.of_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def progress(self) -> Progress:
        """Safe to take while the engine thread is in the middle of adding a token."""
        # in this order: a sequence that ends between the two reads must not show its last token yet
        finished = self.finished
        return Progress(len(self.output_ids) if finished else self.settled, finished)

    def record_version(self, version: str) -> None:
        """Counts the newest token into the span of ``version``."""
        end = len(self.output_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(VersionSpan(version, max(end - 1, 0), end))


def length_reason(sequence: Sequence) -> dict[str, Any]:
    return {"type": "length", "length": len(sequence.output_ids)}


def abort_reason(message: str, status: int | None = None, kind: str | None = None) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}
