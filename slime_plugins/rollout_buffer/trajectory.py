"""What is written to the rollout buffer and what is asked of it, as JSON."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field, model_validator

Version = Annotated[str, Field(max_length=18)]
Positive = Annotated[int, Field(gt=0)]
LONGEST_LEASE_S = 7 * 24 * 3600.0
_FLOAT32 = 3.4e38
Number = Annotated[float, Field(ge=-_FLOAT32, le=_FLOAT32, allow_inf_nan=False)]
"""What training can hold, and the sum of many of which is finite."""
_NAME = r"^[\w-]+$"
_ANSWER_LEVELS = 8
"""More than there are around a trajectory in an answer."""


class Trajectory(BaseModel, extra="forbid"):
    """A conversation with a reward; those of one prompt share ``instance_id``.

    What comes after ``extra_info`` means what it means in `slime.utils.types.Sample`, and is given out where
    it was sent. With L tokens, of which the last R are the response:

    Attributes:
        uid: of this trajectory alone; the same trajectory may be sent again under it.
        messages: may be empty where there are ``tokens``.
        task_type: where it is not that of the run.
        tokens: [L] ids, as the engine had and made them; without them the messages are tokenized.
        response_length: R.
        loss_mask: [R] 1 for tokens that are trained on; all of them without it.
        rollout_log_probs: [R] float, natural logs, of the engine.
        version_spans: versions of the weights and how many tokens in a row each made, R in all; null for
            tokens that no model made.
        status: truncated, if the response reached its limit.
    """

    uid: str = Field(min_length=1, max_length=1000, coerce_numbers_to_str=True)
    instance_id: str = Field(max_length=1000, coerce_numbers_to_str=True)
    messages: list[dict[str, Any]]
    reward: Number
    extra_info: dict[str, Any] = {}
    task_type: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    response_length: int | None = Field(None, gt=0)
    loss_mask: list[Literal[0, 1]] | None = None
    rollout_log_probs: list[Number] | None = None
    version_spans: list[tuple[Version | None, Positive]] | None = None
    status: Literal["completed", "truncated"] = "completed"

    @model_validator(mode="after")
    def _fits(self) -> "Trajectory":
        """Refuses what disagrees about the length of the response."""
        if self.tokens is None:
            if given := [name for name in _OF_TOKENS if getattr(self, name) is not None]:
                raise ValueError(f"{', '.join(given)}: without tokens (wanted: tokens and response_length)")
            if not self.messages:
                raise ValueError("messages: none, and no tokens (wanted: a conversation)")
            return self
        if self.response_length is None or self.response_length > len(self.tokens):
            raise ValueError(
                f"response_length {self.response_length} of {len(self.tokens)} tokens (wanted: 1 to as many)"
            )
        for name, count in self._lengths().items():
            if count != self.response_length:
                raise ValueError(
                    f"{name}: of {count} tokens (wanted: response_length {self.response_length})"
                )
        return self

    @model_validator(mode="after")
    def _is_shallow(self) -> "Trajectory":
        """Refuses what no answer could hold, which would keep all other groups of it back too."""
        nested: Any = [self.messages, self.extra_info]
        for _ in range(_ANSWER_LEVELS):
            nested = [nested]
        try:
            orjson.dumps(nested)
        except orjson.JSONEncodeError as error:
            raise ValueError(f"messages, extra_info: {error} (wanted: fewer levels)") from error
        return self

    def _lengths(self) -> dict[str, int]:
        """How many tokens each field speaks of that was sent."""
        found = {name: getattr(self, name) for name in ("loss_mask", "rollout_log_probs")}
        lengths = {name: len(values) for name, values in found.items() if values is not None}
        if self.version_spans is not None:
            lengths["version_spans"] = sum(count for _, count in self.version_spans)
        return lengths

    def item(self) -> dict[str, Any]:
        """What was sent, without fields that stand for nothing."""
        fields = self.model_dump()
        return {name: value for name, value in fields.items() if name in _ALWAYS or name in self._sent()}

    def _sent(self) -> set[str]:
        return {name for name in self.model_fields_set if getattr(self, name) is not None}


_OF_TOKENS = ("response_length", "loss_mask", "rollout_log_probs", "version_spans")
_ALWAYS = ("uid", "instance_id", "messages", "reward", "extra_info")


def version_range(item: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The oldest and the newest numbered version of the weights that made a trajectory."""
    spans = item.get("version_spans") or ()
    numbers = [int(version) for version, _ in spans if version is not None and version.isdecimal()]
    return min(numbers, default=None), max(numbers, default=None)


class Start(BaseModel, extra="allow"):
    """What a generator is told; further fields are its own.

    Attributes:
        resume: go on with the queue as it is, of the same task and group size, instead of an empty one.
            The generator is told in ``skip_uids`` what was written.
        run: of whose starts all but the first resume, as a part of it may have been started again.
        holder: who fetches for the run now, under leases named ``run.holder.`` and more; what earlier holders
            did not acknowledge comes again at once.
    """

    task_type: str
    num_repeat_per_sample: int = Field(gt=0, lt=2**31)
    resume: bool = False
    run: str | None = Field(None, pattern=_NAME, max_length=400)
    holder: str | None = Field(None, pattern=_NAME, max_length=400)


class Fetch(BaseModel, extra="forbid"):
    """Which complete groups are wanted: all of them, for good, unless it says otherwise.

    Attributes:
        lease: a name of the caller's choice, another one for each fetch. The groups come again if it is not
            acknowledged within ``lease_s`` seconds; the same name again gets the same groups.
    """

    max_groups: int | None = Field(None, gt=0, lt=2**63)
    lease: str | None = Field(None, min_length=1, max_length=1000)
    lease_s: float = Field(600.0, gt=0, le=LONGEST_LEASE_S)


class Acknowledgement(BaseModel, extra="forbid"):
    """Leases whose groups are never to come again."""

    leases: list[str] = Field(min_length=1, max_length=10_000)


class BufferResponse(BaseModel):
    success: bool
    message: str = ""
    data: dict[str, Any] | None = None
