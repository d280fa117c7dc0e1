"""What an engine counts while it answers, summed over the calls of one sample."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class SpecInfo:
    """Counters of speculative decoding, summed over the engine calls of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification; 0 when nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one engine call, under the names of SGLang 0.5.23 or those of the original's fork."""
        accepted = meta_info.get("spec_num_correct_drafts", meta_info.get("spec_accept_token_num", 0))
        drafted = meta_info.get("spec_num_proposed_drafts", meta_info.get("spec_draft_token_num", 0))
        self.spec_accept_token_num += accepted
        self.spec_draft_token_num += drafted
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> "SpecInfo":
        return SpecInfo(**data)


@dataclass
class PrefixCacheInfo:
    """Counters of what an engine had computed before, in tokens, summed over the calls of a sample.

    Attributes:
        cached_tokens: of prompts, found in the engine's cache.
        recomputed_tokens: computed once more, because an update or an abort came between.
    """

    cached_tokens: int = 0
    total_prompt_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached over all prompt tokens; 0 before the first call."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one engine call."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
        self.recomputed_tokens += recomputed_tokens(meta_info)

    def add_resumed(self, meta_info: Mapping[str, Any]) -> None:
        """Count further what a call computed again that went on where an earlier one had ended.

        All but the newest token had been computed.
        """
        computed = meta_info.get("prompt_tokens", 0) - meta_info.get("cached_tokens", 0)
        self.recomputed_tokens += max(computed - 1, 0)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> "PrefixCacheInfo":
        return PrefixCacheInfo(**data)


def recomputed_tokens(meta_info: Mapping[str, Any]) -> int:
    """How many tokens a call computed again, because updates of the weights retracted it.

    All but the newest token had been computed. An update before the first token is not told of.
    """
    if "recomputed_tokens" in meta_info:  # of an answer that is joined of several
        return int(meta_info["recomputed_tokens"])
    if not meta_info.get("num_retractions"):
        return 0
    changes = (meta_info.get("weight_versions") or [])[1:]
    return sum(meta_info["prompt_tokens"] + span["start"] - 1 for span in changes)
