"""What all generation tasks of a process share."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.rollout import RolloutConfig
from slime.config.run import filled
from slime.utils.async_utils import Slots
from slime.utils.cut_stops import TextOf
from slime.utils.engine_count import engine_count
from slime.utils.engine_meta import ASKS_FOR_NUCLEI
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

    def __init__(self, args: Any) -> None:
        config = filled(GenerationConfig, args)
        self.args, self._checkpoint = args, config.hf_checkpoint
        self.tokenizer = load_tokenizer(self._checkpoint.hf_checkpoint, self._checkpoint.trust_remote_code)
        self.semaphore = Slots(partial(requests_at_once, config))
        self.sampling_params = training_sampling_params(config)
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
        return load_processor(self._checkpoint.hf_checkpoint, self._checkpoint.trust_remote_code)

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


def requests_at_once(config: GenerationConfig) -> int:
    """``--sglang-server-concurrency`` of each engine that serves now, of all policies."""
    policies = config.policies.trained_policies.values()
    engines = sum(own.rollout_num_engines for own in policies) or config.engines.rollout_num_engines
    return config.router.sglang_server_concurrency * engine_count.now(engines)


def training_sampling_params(config: GenerationConfig) -> dict[str, Any]:
    """``sampling_params`` of /generate by the ``--rollout-*`` flags."""
    nuclei = {"custom_params": dict(ASKS_FOR_NUCLEI)} if config.nucleus.replays_nucleus else {}
    return {
        "temperature": config.rollout.rollout_temperature,
        "top_p": config.nucleus.rollout_top_p,
        "top_k": config.nucleus.nucleus_top_k,
        "max_new_tokens": config.rollout.rollout_max_response_len,
        "stop": config.rollout.rollout_stop,
        "stop_token_ids": config.rollout.rollout_stop_token_ids,
        "skip_special_tokens": config.rollout.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **nuclei,
    }


def params_for_sample(config: RolloutConfig, params: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """A copy of the sampling parameters, with a seed of the sample's own.

    The running sample index makes the seed differ between the samples of a group and between rollouts,
    and a resumed run repeats it. SGLang ignores the seed without ``--enable-deterministic-inference``.
    """
    return {**params, "sampling_seed": config.rollout_seed + (sample.index or 0)}


def decoder(args: Any, sampling_params: Mapping[str, Any]) -> TextOf:
    """Makes texts of tokens as an engine does that was given these parameters."""
    skips = bool(sampling_params.get("skip_special_tokens"))
    return partial(GenerateState(args).tokenizer.decode, skip_special_tokens=skips)
