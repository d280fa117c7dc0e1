"""User code for the tests, named by dotted path as on the command line."""

import asyncio
import copy
import random
import sys
import threading

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import get_model_url
from slime.rollout.sglang_rollout import generate as stock_generate
from slime.utils.http_utils import asked_adapter, post
from slime.utils.types import Sample
from slime.utils.weight_clock import clock

calls: list = []
told = []
"""What `told_rm` answers."""


async def length_rm(args, sample, **kwargs):
    return float(sample.response_length)


async def label_rm(args, sample, **kwargs):
    return float(sample.label in sample.response)


def thread_rm(args, sample, **kwargs):
    calls.append(threading.current_thread().name)
    return 1.0


async def group_rm(args, samples, **kwargs):
    calls.append([sample.index for sample in samples])
    return [float(rank) for rank in range(len(samples))]


async def told_rm(args, samples, **kwargs):
    return list(told)


async def exiting_rm(args, sample, **kwargs):
    sys.exit("gave up")


async def failing_rm(args, sample, **kwargs):
    raise KeyError("no such column")


async def silent_rm(args, sample, **kwargs):
    return None


async def nan_rm(args, sample, **kwargs):
    return float("nan")


async def nan_group_rm(args, samples, **kwargs):
    return [{"score": 1.0}, {"score": float("inf")}]


async def nan_reward_generate(args, sample, sampling_params):
    sample.reward, sample.status = float("nan"), Sample.Status.COMPLETED
    return sample


def drop_odd_groups(args, group):
    odd = group[0].group_index % 2 == 1
    return DynamicFilterOutput(keep=not odd, reason="odd" if odd else None)


def drop_some(args, group):
    return group[0].group_index % 4 != 1


def failing_filter(args, group):
    raise ZeroDivisionError("oh")


async def failing_generate(args, sample, sampling_params):
    if sample.index == 3:
        raise LookupError("tool is gone")
    return await stock_generate(args, sample, sampling_params)


async def split_generate(args, sample, sampling_params, evaluation=False):
    calls.append(evaluation)
    sample = await stock_generate(args, sample, sampling_params)
    sample.rollout_id = sample.index
    sibling = copy.deepcopy(sample)
    sibling.reward = None
    return [sample, sibling]


async def split_rm(args, samples, **kwargs):
    return [0.5] * len(samples)


async def anew_generate(args, sample, sampling_params):
    return [Sample(rollout_id=sample.index, reward=0.0, status=Sample.Status.COMPLETED) for _ in range(2)]


async def wrong_generate(args, sample, sampling_params):
    return "text"


async def nan_generate(args, sample, sampling_params):
    sample = await stock_generate(args, sample, sampling_params)
    if sample.index == 3:
        sample.rollout_log_probs[1] = float("nan")
    return sample


async def text_log_probs_generate(args, sample, sampling_params):
    sample = await stock_generate(args, sample, sampling_params)
    sample.rollout_log_probs = ["-0.1"] * sample.response_length
    return sample


_shared: list = []


async def shared_generate(args, sample, sampling_params):
    if not _shared:
        _shared.append(await stock_generate(args, sample, sampling_params))
    return _shared[0]


async def twice_generate(args, sample, sampling_params):
    sample = await stock_generate(args, sample, sampling_params)
    return [sample, sample]


async def self_scored_generate(args, sample, sampling_params):
    sample = await stock_generate(args, sample, sampling_params)
    sample.reward = "good"
    return sample


async def text_rm(args, sample, **kwargs):
    return "1.0"


async def list_rm(args, sample, **kwargs):
    return [1.0]


async def text_group_rm(args, samples, **kwargs):
    return [1.0, *["good"] * (len(samples) - 1)]


async def giving_up_generate(args, sample, sampling_params):
    if sample.index == 3:
        sample.status = Sample.Status.ABORTED
        return sample
    return await stock_generate(args, sample, sampling_params)


async def giving_up_every_other(args, sample, sampling_params):
    return await (always_aborted if sample.index % 2 else stock_generate)(args, sample, sampling_params)


async def interrupted_generate(args, sample, sampling_params):
    """A token now and then, until a weight update aborts it; by the sample's index some take long."""
    chance = random.Random(sample.index)
    for _ in range(chance.choice([1, 2, 30]) - sample.response_length):
        updates = clock.updates
        await asyncio.sleep(0)
        if clock.updates != updates:
            sample.status = Sample.Status.ABORTED
            return sample
        sample.append_response_tokens(
            tokens=[5], log_probs=[-1.0], meta_info={"weight_version": str(clock.version)}, text="x"
        )
        sample.status = Sample.Status.PENDING
    sample.status = Sample.Status.COMPLETED
    return sample


async def always_aborted(args, sample, sampling_params):
    sample.status = Sample.Status.ABORTED
    return sample


async def worthless_generate(args, sample, sampling_params):
    sample = await stock_generate(args, sample, sampling_params)
    if sample.index == 3:
        sample.status, sample.reward = Sample.Status.ABORTED, -1.0
    return sample


async def nested_group_rm(args, group, **kwargs):
    return [[2.0 * i + 1, 2.0 * i + 2] for i, split in enumerate(group) if len(split) == 2]


async def per_execution_group_rm(args, group, **kwargs):
    return [float(i + 1) for i, split in enumerate(group) if len(split) == 2]


async def flat_group_rm(args, group, **kwargs):
    return [1.0, 2.0, 3.0, 4.0]


async def short_group_rm(args, group, **kwargs):
    return [1.0]


def own_rollout(args, rollout_id, data_source, evaluation=False):
    """Whose groups are its own business; it makes none."""
    return []


def bare_hook(args, sample):
    sample.metadata["hooked"] = (True,)


def evaluation_hook(args, sample, evaluation):
    sample.metadata["hooked"] += (evaluation,)


async def instant_generate(args, sample, sampling_params):
    calls.append(sample.index)
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text="x")
    sample.status, sample.weight_versions = Sample.Status.COMPLETED, ["1"]
    return sample


async def instant_split_generate(args, sample, sampling_params):
    sample = await instant_generate(args, sample, sampling_params)
    sample.rollout_id = sample.index
    return [sample, copy.deepcopy(sample)]


async def slow_first_generate(args, sample, sampling_params):
    """The first group gets no further than a token before the others are enough."""
    state = GenerateState(args)
    while sample.group_index == 0 and not state.aborted:
        await asyncio.sleep(0.001)
    sample = await instant_generate(args, sample, sampling_params)
    sample.status = Sample.Status.ABORTED if sample.group_index == 0 else sample.status
    return sample


async def hanging_generate(args, sample, sampling_params):
    await asyncio.sleep(1000)


async def cut_hook(args, sample, *, rollout_id, evaluation):
    sample.metadata["hooked"] = (rollout_id, evaluation)


def replace_hook(args, sample, *, rollout_id, evaluation):
    copied = copy.deepcopy(sample)
    copied.metadata["replaced"] = True
    return copied


def grade_hook(args, sample, *, rollout_id, evaluation):
    sample.reward = {"good": 1.0}[sample.reward]


def spoil_hook(args, sample, *, rollout_id, evaluation):
    sample.reward = "bad"


def remove_short(args, groups):
    for group in groups:
        group[0].remove_sample = True


def look_at_all(args, all_groups, get_samples):
    calls.append((len(all_groups), len(get_samples(2))))


def note_all(args, all_groups, get_samples):
    calls.append([group[0].group_index for group in all_groups])


def newest_first(args, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


class BareSource:
    """A data source with nothing but the methods that the rollout needs."""

    def __init__(self, args):
        self.next = 0

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            groups.append([Sample(prompt=prompt, index=self.next, group_index=self.next)])
            self.next += 1
        return groups


class OwnOrder(RolloutDataSourceWithBuffer):
    """Draws prompts without the parent's help."""

    def get_samples(self, num_samples):
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples:
            groups.append(self._make_group(self.dataset.samples[self.sample_offset]))
            self.sample_offset += 1
        return groups


class OwnBuffer(RolloutDataSourceWithBuffer):
    """Keeps what is handed back in a place of its own."""

    def __init__(self, args):
        super().__init__(args)
        self.waiting = []

    def add_samples(self, samples):
        self.waiting += samples

    def get_samples(self, num_samples):
        groups, self.waiting = self.waiting[:num_samples], self.waiting[num_samples:]
        return groups + super().get_samples(num_samples - len(groups))


def newest_only(args, rollout_id, buffer, num_samples):
    newest = buffer[-1:]
    buffer.clear()
    return newest


def all_of_it(args, rollout_id, buffer, num_samples):
    groups = list(buffer)
    buffer.clear()
    return groups


def last_selected(args, rollout_id, buffer, num_samples):
    by_age = sorted(buffer, key=lambda group: -group[0].group_index)
    return [list(group) for group in by_age[:num_samples]]


def first_twice(args, rollout_id, buffer, num_samples):
    return [buffer[0], buffer[0]]


def made_up(args, rollout_id, buffer, num_samples):
    return [[Sample(), Sample()]]


async def chatting_generate(args, sample, sampling_params):
    """Asks the engine by another of its endpoints, from a task of its own."""
    url = get_model_url(args, endpoint="/v1/chat/completions")
    answer = await asyncio.create_task(post(url, {"messages": [{"role": "user", "content": sample.prompt}]}))
    sample.response = answer["text"]
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    return sample


async def asking_rm(args, sample, **kwargs):
    """Has the engine judge an answer, or those of a group."""
    samples = sample if isinstance(sample, list) else [sample]
    await post(get_model_url(args, endpoint="/v1/chat/completions"), {"messages": []})
    return [1.0] * len(samples) if samples is sample else 1.0


def asking_hook(args, sample):
    calls.append(asked_adapter())
