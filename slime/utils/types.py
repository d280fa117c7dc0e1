"""The data that rooms hand to one another: samples, train batches, engine addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

import numpy as np

from slime.utils.engine_meta import (
    RoutedShape,
    VersionSpans,
    fit_versions,
    merge_routed_experts,
    merge_top_p,
    merge_versions,
)

RolloutBatch = dict[str, Any]


class RewardChoice(Protocol):
    """Of ``args``: which reward to train on."""

    @property
    def reward_key(self) -> str | None: ...


@dataclass(frozen=True)
class EngineEndpoint:
    """Where one engine serves, and which GPUs it takes.

    ``gpu_offset`` is the absolute slot of its first GPU among the trainer's; None if it shares none.
    ``bootstrap_port`` is where an engine that prefills hands on what it has computed.
    """

    url: str
    api_key: str | None
    num_gpus: int
    gpu_offset: int | None
    bootstrap_port: int | None = None


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
    """Counters of the engine's prefix cache, in prompt tokens, summed over the calls of a sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached over all prompt tokens; 0 before the first call."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one engine call."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> "PrefixCacheInfo":
        return PrefixCacheInfo(**data)


def _plain(value: Any) -> Any:
    """``value`` without the numpy types that ``torch.load(weights_only=True)`` refuses; arrays as tensors."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSUMmV":
        return _plain(value.tolist())
    if isinstance(value, np.ndarray):
        import torch  # not for every process that knows what a sample is

        return torch.from_numpy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


class SampleStatus(Enum):
    """How far the generation of a sample got."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass
class Sample:
    """One prompt with one response, from the data source to the train batch.

    L is the length of ``tokens``, R of the response. ``loss_mask`` [R] holds 0/1 and
    ``rollout_log_probs`` [R] natural logs from the engine; None means "all ones" and "not recorded".
    """

    group_index: int | None = None
    index: int | None = None
    # Samples that one execution was split into share this id, and one weight in the loss.
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    # int32 [L - 1, layers, top-k]
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    # Seconds spent outside the engine, in tools for instance.
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    # Of the response, as far as `append_response_tokens` made it; R tokens in all.
    version_spans: VersionSpans = field(default_factory=list)

    # Not annotated, hence no field: user code writes Sample.Status.COMPLETED.
    Status = SampleStatus

    def to_dict(self) -> dict[str, Any]:
        """A copy of the attributes as plain data and tensors, for dumps and saved buffers."""
        return {key: _plain(value) for key, value in self.__dict__.items()} | {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Sample":
        """Inverse of ``to_dict``; keys that are not fields become plain attributes."""
        values = dict(data)
        values["status"] = SampleStatus(values.get("status", "pending"))
        values["spec_info"] = SpecInfo.from_dict(values.get("spec_info", {}))
        values["prefix_cache_info"] = PrefixCacheInfo.from_dict(values.get("prefix_cache_info", {}))
        values["version_spans"] = [(version, count) for version, count in values.get("version_spans", [])]
        names = {f.name for f in fields(Sample)}
        sample = Sample(**{key: value for key, value in values.items() if key in names})
        for key in values.keys() - names:
            setattr(sample, key, values[key])
        return sample

    def get_reward_value(self, args: RewardChoice) -> Any:
        """The number to train on: ``reward``, or its entry ``--reward-key``."""
        if not args.reward_key:
            return self.reward
        if not isinstance(self.reward, dict) or args.reward_key not in self.reward:
            raise ValueError(
                f"--reward-key {args.reward_key}: reward of sample {self.index} is {self.reward!r}, "
                "expected a dict with that key"
            )
        return self.reward[args.reward_key]

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def token_versions(self) -> list[str | None]:
        """Per response token the version of the weights that made it; None where it is not known."""
        spans = self.version_spans
        if not spans and len(set(self.weight_versions)) == 1:
            spans = [(self.weight_versions[0], self.response_length)]
        fitted = fit_versions(spans, self.response_length)
        return [version for version, count in fitted for _ in range(count)]

    def append_response_tokens(
        self,
        args: RoutedShape | None = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the response by tokens of the model (trainable) or of a tool or user (not trainable).

        Args:
            log_probs: the engine's, one per trainable token; other tokens get 0.0.
            meta_info: of the engine's answer that brought the tokens.
            update_terminal_info: take status and weight version from ``meta_info`` as well.

        Raises:
            ValueError: lengths disagree, trainable tokens lack log-probs, or others bring some.
        """
        self._check_new_tokens(tokens, log_probs, trainable)
        earlier = self.response_length
        if trainable and earlier and self.rollout_log_probs is None:
            raise ValueError(f"sample {self.index}: its first {earlier} response tokens have no log-probs")
        if self.loss_mask is None:
            self.loss_mask = [1] * earlier
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * earlier
        count = len(tokens)
        self.version_spans = merge_versions(self.version_spans, earlier, meta_info, count)
        self.tokens = [*self.tokens, *tokens]
        self.response_length += count
        self.loss_mask = [*self.loss_mask, *[int(trainable)] * count]
        self.rollout_log_probs = [*self.rollout_log_probs, *(log_probs or [0.0] * count)]
        self.response += text or ""
        if not trainable and self.rollout_top_p_token_offsets is not None:
            # No model sampled these tokens: their nuclei are empty.
            last = self.rollout_top_p_token_offsets[-1]
            self.rollout_top_p_token_offsets = [*self.rollout_top_p_token_offsets, *[last] * count]
        if meta_info is not None:
            self._apply_meta_info(args, meta_info, count, update_terminal_info)
        self._validate_response_metadata_lengths()

    def _check_new_tokens(
        self, tokens: Sequence[int], log_probs: Sequence[float] | None, trainable: bool
    ) -> None:
        if not trainable and log_probs:
            raise ValueError(f"sample {self.index}: tokens that are not trainable bring log-probs")
        if trainable and log_probs is None:
            raise ValueError(f"sample {self.index}: trainable tokens lack log-probs")
        if log_probs is not None and trainable and len(log_probs) != len(tokens):
            raise ValueError(f"sample {self.index}: {len(tokens)} tokens but {len(log_probs)} log-probs")

    def _apply_meta_info(
        self, args: RoutedShape | None, meta_info: Mapping[str, Any], count: int, update_terminal_info: bool
    ) -> None:
        no_nuclei = [0] * (self.response_length - count + 1)
        earlier = self.rollout_top_p_token_ids or [], self.rollout_top_p_token_offsets or no_nuclei
        if (nuclei := merge_top_p(earlier, meta_info, count)) is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = nuclei
        experts = merge_routed_experts(self.rollout_routed_experts, len(self.tokens), args, meta_info)
        if experts is not None:
            self.rollout_routed_experts = experts
        reason = meta_info.get("finish_reason")
        if not reason or not update_terminal_info:
            return
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions = [*self.weight_versions, meta_info["weight_version"]]
        if reason["type"] not in _STATUS_OF_FINISH_REASON:
            raise ValueError(f"finish_reason {reason!r}: expected type stop, length or abort")
        self.status = _STATUS_OF_FINISH_REASON[reason["type"]]

    def _validate_response_metadata_lengths(self) -> None:
        """Raise ValueError unless everything recorded per response token has R entries."""
        for name in ("loss_mask", "rollout_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(value)} entries for {self.response_length}"
                    " response tokens"
                )
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if (ids is None) != (offsets is None):
            raise ValueError(f"sample {self.index}: top-p token ids and offsets come together or not at all")
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError(
                f"sample {self.index}: {len(offsets)} top-p offsets for {self.response_length} tokens"
            )


def name_samples(samples: Sample | list[Sample]) -> str:
    """``sample 17 of group 2``, or a list of samples in short."""
    if isinstance(samples, Sample):
        return f"sample {samples.index} of group {samples.group_index}"
    return f"samples {[sample.index for sample in samples]}"
