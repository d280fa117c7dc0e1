"""What all generation tasks of a process share."""

import asyncio
from typing import Any

from slime.arguments.views import RolloutView
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


class GenerateState:
    """One per process: ``GenerateState(args)`` makes it at the first call and returns it afterwards.

    Attributes:
        tokenizer: of ``--hf-checkpoint``.
        semaphore: limits samples in generation to ``--sglang-server-concurrency`` per engine.
        sampling_params: of the training rollouts; copy before changing.
        processor: of images and other inputs; None, as prompts are text.
        aborted: the rollout has enough; generation functions should return as soon as they can.
        pending: running tasks and the group each works on.
    """

    processor: None = None
    _instance: "GenerateState | None" = None

    def __new__(cls, args: RolloutView) -> "GenerateState":
        if GenerateState._instance is None:
            state = super().__new__(cls)
            state._build(args)
            GenerateState._instance = state
        return GenerateState._instance

    @staticmethod
    def clear() -> None:
        """Forget the instance, so that the next call builds one from its own args."""
        GenerateState._instance = None

    def _build(self, args: RolloutView) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * get_rollout_num_engines(args))
        self.sampling_params = training_sampling_params(args)
        self.aborted = False
        self.pending: dict[asyncio.Task[list[Any]], list[Sample]] = {}

    def reset(self) -> None:
        """Be ready for the next rollout."""
        self.aborted = False
        self.pending = {}

    @property
    def pendings(self) -> set["asyncio.Task[list[Any]]"]:
        """The running tasks."""
        return set(self.pending)

    @property
    def remaining_batch_size(self) -> int:
        """Groups in flight."""
        return len(self.pending)

    def encode_prompt(self, sample: Sample) -> list[int]:
        """Token ids of a sample's prompt.

        Raises:
            ValueError: the prompt is a message list that no template was applied to.
        """
        if not isinstance(sample.prompt, str):
            raise ValueError(
                f"the prompt of sample {sample.index} is a list of messages: pass --apply-chat-template, "
                "or a --custom-generate-function-path that renders it"
            )
        return self.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]


def training_sampling_params(args: RolloutView) -> dict[str, Any]:
    """``sampling_params`` of /generate by the ``--rollout-*`` flags."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def params_for_sample(args: RolloutView, params: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """A copy of the sampling parameters, with a seed of the sample's own.

    The running sample index makes the seed differ between the samples of a group and between rollouts,
    and a resumed run repeats it. SGLang ignores the seed without ``--enable-deterministic-inference``.
    """
    return {**params, "sampling_seed": args.rollout_seed + (sample.index or 0)}
