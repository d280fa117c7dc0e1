"""What all generation tasks of a process share."""

import asyncio
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from slime.arguments.views import RolloutView
from slime.utils.async_utils import Slots
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

Task = asyncio.Task[list[Any]]
_PROMPTS_KEPT = 256


class GenerateState(metaclass=SingletonMeta):
    """One per process: ``GenerateState(args)`` makes it at the first call and returns it afterwards.

    Attributes:
        tokenizer: of ``--hf-checkpoint``.
        semaphore: limits samples in generation to ``--sglang-server-concurrency`` per engine.
        sampling_params: of the training rollouts; copy before changing.
        aborted: the rollout has enough; generation functions should return as soon as they can.
        pending: running tasks and the group each works on.
        remaining_batch_size: for a rollout function of the user's that counts the groups it still expects.
    """

    def __init__(self, args: RolloutView) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
        self.semaphore = Slots(args.sglang_server_concurrency * get_rollout_num_engines(args))
        self.sampling_params = training_sampling_params(args)
        self._encoded: dict[str, list[int]] = {}
        self.reset()

    def reset(self) -> None:
        """Be ready for the next rollout."""
        self.aborted = False
        self.pending: dict[Task, list[Sample]] = {}
        self.remaining_batch_size = 0

    @cached_property
    def processor(self) -> Any:
        """The processor of ``--hf-checkpoint``, for inputs beside text; None if it is for text alone."""
        return load_processor(self.args.hf_checkpoint, self.args.trust_remote_code)

    @property
    def pendings(self) -> set[Task]:
        """The running tasks, without their groups; setting them forgets the others."""
        return set(self.pending)

    @pendings.setter
    def pendings(self, tasks: Iterable[Task]) -> None:
        self.pending = {task: self.pending.get(task, []) for task in tasks}

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start a task for each group, for a rollout function of the user's that waits for ``pendings``."""
        generate_group = load_function("slime.rollout.generation.generate_and_rm_group")  # it knows this file
        for group in samples:
            task = asyncio.create_task(generate_group(self.args, group, dict(self.sampling_params)))
            self.pending[task] = group
        self.remaining_batch_size += len(samples)

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
        return list(self._encode(sample.prompt))

    def _encode(self, prompt: str) -> list[int]:
        """The samples of a group share their prompt, and mostly ask one after the other."""
        if prompt not in self._encoded:
            if len(self._encoded) >= _PROMPTS_KEPT:
                self._encoded.clear()
            self._encoded[prompt] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return self._encoded[prompt]


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
