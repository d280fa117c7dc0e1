"""The data that rooms hand to one another: samples, train batches, engine addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

import numpy as np

from slime.utils import engine_counters
from slime.utils.engine_meta import (
    RequestTimes,
    RoutedShape,
    VersionSpans,
    fit_versions,
    log_probs_within,
    merge_request_times,
    merge_routed_experts,
    merge_top_p,
    merge_versions,
)
from slime.utils.model_inputs import SequenceInputs

RolloutBatch = dict[str, Any]


EARLIER_TOKENS = "earlier_response_tokens"
"""A key of the metadata of a sample that a rollout handed on: how many tokens its response had then."""


_PLAIN = frozenset((int, float, str, bool, bytes, type(None)))


class RewardChoice(Protocol):
    """The part of ``args`` that says which reward to train on."""

    @property
    def reward_key(self) -> str | None: ...


@dataclass(frozen=True)
class EngineEndpoint:
    """The address of an engine, and the GPUs that it takes.

    ``gpu_offset`` is the absolute slot of its first GPU among the trainer's; None if it shares none.
    ``bootstrap_port`` is where an engine that prefills hands on what it has computed.
    ``puller`` is the URL of the helper that fetches weights to its machine; None if it does so itself.
    """

    url: str
    api_key: str | None
    num_gpus: int
    gpu_offset: int | None
    bootstrap_port: int | None = None
    puller: str | None = None


def plain(value: Any) -> Any:
    """``value`` without the numpy types that ``torch.load(weights_only=True)`` refuses; arrays as tensors."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSUMmV":
        return plain(value.tolist())
    if isinstance(value, np.ndarray):
        import torch  # not for every process that knows what a sample is

        return torch.from_numpy(value)
    if type(value) in (list, tuple):
        is_flat = _PLAIN.issuperset(map(type, value))  # of a million numbers, each would be a call
        return type(value)(value if is_flat else map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _as_list(values: Any) -> list[Any]:
    """A list of plain numbers, of a sequence, a tensor or an array; empty for None."""
    if values is None:
        return []
    return values.reshape(-1).tolist() if hasattr(values, "tolist") else list(values)


def _extended(values: Any, more: list[Any]) -> list[Any]:
    """Extends a list in place; anything else becomes a list."""
    found = values if type(values) is list else _as_list(values)
    found += more
    return found


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
    # Whose answer it is, in a run of several policies: a name of --policies.
    policy: str | None = None
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
    spec_info: engine_counters.SpecInfo = field(default_factory=engine_counters.SpecInfo)
    prefix_cache_info: engine_counters.PrefixCacheInfo = field(
        default_factory=engine_counters.PrefixCacheInfo
    )
    # Of the response, as far as `append_response_tokens` made it; R tokens in all.
    version_spans: VersionSpans = field(default_factory=list)
    # Of the engine calls that `append_response_tokens` was told of.
    request_times: RequestTimes = field(default_factory=dict)

    # Not annotated, hence no fields: user code writes Sample.Status.COMPLETED.
    Status = SampleStatus
    SpecInfo = engine_counters.SpecInfo
    PrefixCacheInfo = engine_counters.PrefixCacheInfo

    def to_dict(self) -> dict[str, Any]:
        """A copy of the attributes as plain data and tensors, for dumps and saved buffers."""
        return {key: plain(value) for key, value in self.__dict__.items()} | {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Sample":
        """Inverse of ``to_dict``; keys that are not fields become plain attributes."""
        values = dict(data)
        values["status"] = SampleStatus(values.get("status", "pending"))
        values["spec_info"] = Sample.SpecInfo.from_dict(values.get("spec_info", {}))
        values["prefix_cache_info"] = Sample.PrefixCacheInfo.from_dict(values.get("prefix_cache_info", {}))
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
    def model_inputs(self) -> SequenceInputs:
        """What a model computes of this sample."""
        return SequenceInputs(self.tokens, media=self.multimodal_train_inputs or {})

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
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the response by tokens of the model (trainable) or of a tool or user (not trainable).

        Lists of the sample grow in place, so that a generate function may hold them under names of its own.

        Args:
            tokens: ids, as a sequence, tensor or array; none where an answer was aborted before its first.
            log_probs: the engine's, one per trainable token; other tokens get 0.0. Where ``meta_info`` has
                nuclei, those within the nuclei are kept.
            meta_info: of the engine's answer that brought the tokens.
            update_terminal_info: take status and weight version from ``meta_info`` as well.

        Raises:
            ValueError: lengths disagree, trainable tokens lack log-probs, or others bring some.
        """
        ids = _as_list(tokens)
        count, earlier = len(ids), self.response_length
        log_probs = log_probs_within(meta_info or {}, log_probs)
        values = self._log_probs_of(count, log_probs, trainable)
        self.version_spans = merge_versions(self.version_spans, earlier, meta_info, count)
        if ids:
            self._extend(ids, values, trainable)
        self.response += text or ""
        if meta_info is not None:
            self._merge_token_info(args, meta_info, count)
            if update_terminal_info:
                self.update_from_meta_info(args, meta_info)
        self._validate_response_metadata_lengths()

    def _log_probs_of(self, count: int, log_probs: Sequence[float] | None, trainable: bool) -> list[float]:
        """One per new token; 0.0 for tokens that no model sampled."""
        values = _as_list(log_probs)
        if not trainable:
            if values:
                raise ValueError(f"sample {self.index}: tokens that are not trainable bring log-probs")
            return [0.0] * count
        if log_probs is None and count:
            raise ValueError(f"sample {self.index}: trainable tokens lack log-probs")
        if len(values) != count:
            raise ValueError(f"sample {self.index}: {count} tokens but {len(values)} log-probs")
        if count and self.response_length and self.rollout_log_probs is None:
            raise ValueError(
                f"sample {self.index}: its first {self.response_length} response tokens have no log-probs"
            )
        return values

    def _extend(self, ids: list[int], log_probs: list[float], trainable: bool) -> None:
        earlier = self.response_length
        mask = [1] * earlier if self.loss_mask is None else self.loss_mask
        before = [0.0] * earlier if self.rollout_log_probs is None else self.rollout_log_probs
        self.tokens = _extended(self.tokens, ids)
        self.response_length += len(ids)
        self.loss_mask = _extended(mask, [int(trainable)] * len(ids))
        self.rollout_log_probs = _extended(before, log_probs)
        if not trainable and self.rollout_top_p_token_offsets is not None:
            # No model sampled these tokens: their nuclei are empty.
            last = self.rollout_top_p_token_offsets[-1]
            self.rollout_top_p_token_offsets = [*self.rollout_top_p_token_offsets, *[last] * len(ids)]

    def _merge_token_info(self, args: RoutedShape | None, meta_info: Mapping[str, Any], count: int) -> None:
        """What ``meta_info`` says of each of the ``count`` tokens that it brought."""
        no_nuclei = [0] * (self.response_length - count + 1)
        earlier = self.rollout_top_p_token_ids or [], self.rollout_top_p_token_offsets or no_nuclei
        if (nuclei := merge_top_p(earlier, meta_info, count)) is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = nuclei
        experts = merge_routed_experts(self.rollout_routed_experts, len(self.tokens), args, meta_info)
        if experts is not None:
            self.rollout_routed_experts = experts

    def update_from_meta_info(self, args: RoutedShape | None, meta_info: Mapping[str, Any]) -> None:
        """Counters, weight version and status from the end of an engine's answer, if it has ended.

        A finish reason other than stop, length and abort leaves the status as it is.
        """
        reason = meta_info.get("finish_reason")
        if not reason:
            return
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        self.request_times = merge_request_times(self.request_times, meta_info)
        if "weight_version" in meta_info:
            self.weight_versions = _extended(self.weight_versions, [meta_info["weight_version"]])
        self.status = _STATUS_OF_FINISH_REASON.get(reason["type"], self.status)

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


@dataclass(frozen=True)
class ParamInfo:
    """A parameter that a rank holds, as plug-ins describe it to other ranks.

    Attributes:
        attrs: how it is split: ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``.
        size: bytes of the rank's part.
        src_rank: the rank.
    """

    name: str
    dtype: Any
    shape: Any
    attrs: Mapping[str, Any]
    size: int
    src_rank: int
