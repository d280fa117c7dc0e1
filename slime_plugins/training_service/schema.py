"""What is asked of the service, as JSON; field names are those of Tinker's public API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

_FLOAT32 = 3.4e38
Number = Annotated[float, Field(ge=-_FLOAT32, le=_FLOAT32, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

_WANTED = {
    "cross_entropy": {"weights"},
    "importance_sampling": {"logprobs", "advantages"},
    "ppo": {"logprobs", "advantages"},
}


class Request(BaseModel, extra="forbid"):
    """A body in which nothing is unknown."""


class LossInputs(Request):
    """One entry of each for every token of ``target_tokens``; the loss says which it wants."""

    target_tokens: list[Token] = Field(min_length=1)
    weights: list[Number] | None = None
    logprobs: list[Number] | None = None
    advantages: list[Number] | None = None

    @model_validator(mode="after")
    def _lengths(self) -> "LossInputs":
        wanted = len(self.target_tokens)
        for name in self.given:
            found = len(getattr(self, name))
            if found != wanted:
                raise ValueError(f"{name} has {found} entries (wanted: {wanted}, as target_tokens)")
        return self

    @property
    def given(self) -> set[str]:
        """Which of the optional ones there are."""
        names = ("weights", "logprobs", "advantages")
        return {name for name in names if getattr(self, name) is not None}


class Datum(Request):
    """A sequence and what to learn of it: ``target_tokens`` are its tokens, each one place further."""

    model_input: list[Token] = Field(min_length=1)
    loss_fn_inputs: LossInputs

    @model_validator(mode="after")
    def _shifted(self) -> "Datum":
        targets = self.loss_fn_inputs.target_tokens
        if len(targets) != len(self.model_input) or targets[:-1] != self.model_input[1:]:
            raise ValueError("target_tokens are not model_input, each token one place further, and one more")
        return self

    @property
    def tokens(self) -> list[int]:
        """The whole sequence."""
        return [*self.model_input, self.loss_fn_inputs.target_tokens[-1]]

    def for_trainer(self) -> dict[str, Any]:
        """See `slime.training.tenants`."""
        inputs = self.loss_fn_inputs
        advantages = inputs.weights if inputs.advantages is None else inputs.advantages
        log_probs = inputs.logprobs or [0.0] * len(inputs.target_tokens)
        return {"tokens": self.tokens, "advantages": advantages, "log_probs": log_probs}


class ForwardBackward(Request):
    """Data whose gradients are added to the tenant's."""

    data: list[Datum] = Field(min_length=1, max_length=4096)
    loss_fn: Literal["cross_entropy", "importance_sampling", "ppo"]
    loss_fn_config: dict[Literal["clip_low_threshold", "clip_high_threshold"], Number] = {}

    @model_validator(mode="after")
    def _inputs_of_loss(self) -> "ForwardBackward":
        wanted = _WANTED[self.loss_fn]
        for number, datum in enumerate(self.data):
            if (found := datum.loss_fn_inputs.given) != wanted:
                has = ", ".join(sorted(found)) or "nothing"
                raise ValueError(
                    f"datum {number}: {self.loss_fn} has {has} (wanted: {', '.join(sorted(wanted))})"
                )
        if self.loss_fn_config and self.loss_fn != "ppo":
            raise ValueError(f"loss_fn_config: {self.loss_fn} has none (wanted: loss_fn ppo)")
        return self


class AdamParams(Request):
    """The optimizer step; ``grad_clip_norm`` 0 clips nothing."""

    learning_rate: float = Field(1e-4, ge=0, le=10)
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: float = Field(1e-12, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=10)
    grad_clip_norm: float = Field(0.0, ge=0, le=_FLOAT32)


class SamplingParams(Request):
    """How tokens are drawn."""

    max_tokens: int = Field(gt=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    stop: list[str] = []
    stop_token_ids: list[Token] = []

    def for_engine(self) -> dict[str, Any]:
        """SGLang's names."""
        given = self.model_dump(exclude={"max_tokens"})
        return {"max_new_tokens": self.max_tokens, **given}


class Sample(Request):
    """Answers to a prompt by the tenant's weights as they were saved for the sampler last."""

    prompt: list[Token] = Field(min_length=1)
    num_samples: int = Field(1, gt=0, le=1024)
    sampling_params: SamplingParams


class State(Request):
    """The name of a saved state; ``of`` is the tenant that has saved it, if another one."""

    name: Name
    of: Name | None = None
