"""The source of prompts, in an order that a restart continues exactly."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sized
from pathlib import Path
from typing import Any

from slime.arguments.core.runtime_context import with_context
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.copies import copied
from slime.rollout.data_state import from_plain, read_state, state_path, to_plain, write_state
from slime.rollout.ledger import BUFFER_FILTER, Ledger
from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

Group = list[Sample]


class DataSource(ABC):
    """Gives out groups of samples that share a prompt; takes unfinished ones back."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """``num_samples`` groups."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back for a later ``get_samples``."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state after this rollout."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state after this rollout, if it was saved."""

    @abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""


def rollouts_per_epoch(config: GenerationConfig, prompts: Sized) -> int | None:
    """Counts the rollouts of an epoch; None also where the data is smaller: none ends with an epoch then."""
    if not config.data.rollout_global_dataset:
        return None
    return len(prompts) // config.batches.rollout_batch_size or None


def rollouts_of_run(config: GenerationConfig, prompts: Sized) -> int | None:
    """Rollouts of the whole run; None where ``--num-epoch`` meets data without an epoch."""
    per_epoch = rollouts_per_epoch(config, prompts)
    if config.data.num_rollout is not None or per_epoch is None or config.data.num_epoch is None:
        return config.data.num_rollout
    return config.data.num_epoch * per_epoch


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data``, epoch after epoch, each copied into a group of samples.

    After a restart the groups that were leased when the state was saved come first.
    """

    keeps_books = True

    def __init__(self, args: Any) -> None:
        self.args, self._generation = args, filled(GenerationConfig, args)
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.ledger = Ledger()
        self._returned: list[Group] = []  # were leased when the state was saved
        self.dataset = self._load_dataset() if self._generation.data.rollout_global_dataset else None
        if self._generation.data.num_rollout is None:
            self.args = with_context(args, num_rollout=rollouts_of_run(self._generation, self))
        self.notices = self._notices()
        self._shuffle()

    def _load_dataset(self) -> Dataset:
        config = self._generation
        if config.data.prompt_data is None:
            raise ValueError(
                "--prompt-data: not given, expected a file (or pass --disable-rollout-global-dataset)"
            )
        tokenizer = load_tokenizer(config.hf_checkpoint.hf_checkpoint, config.hf_checkpoint.trust_remote_code)
        if config.debug.dump_details:
            tokenizer.save_pretrained(Path(config.debug.dump_details) / "tokenizer")
        return Dataset(
            config.data.prompt_data,
            tokenizer,
            max_length=config.rollout.rollout_max_prompt_len,
            prompt_key=config.data.input_key,
            label_key=config.data.label_key,
            tool_key=config.data.tool_key,
            metadata_key=config.data.metadata_key,
            seed=config.rollout.rollout_seed,
            apply_chat_template=config.data.apply_chat_template,
            apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
            # Of the built-in classes the records were looked at when the command line was read.
            check=type(self).__module__ != __name__,
        )

    def _notices(self) -> list[str]:
        if self.dataset is None:
            return []
        longest = self._generation.rollout.rollout_max_prompt_len
        lines = self.dataset.too_long(f"--rollout-max-prompt-len {longest}")
        return [f"--prompt-data {self._generation.data.prompt_data}: {line}" for line in lines]

    def data_metrics(self) -> dict[str, int]:
        """Returns metrics of every rollout: how many prompts are too long to be given out."""
        count = self.dataset.num_too_long if self.dataset is not None else 0
        return {"rollout/dropped/prompts_too_long": count} if count else {}

    def __len__(self) -> int:
        return len(self.dataset) if self.dataset is not None else 0

    def get_buffer_length(self) -> int:
        """Groups that were given out before and wait."""
        return len(self._returned)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_samples(self, num_samples: int) -> list[Group]:
        with self.ledger.lock:
            groups = self._pop_returned(num_samples)
            count = num_samples - len(groups)
            prompts = [Sample()] * count if self.dataset is None else self._next_prompts(count)
            self.ledger.issue(count)
            return groups + [self._make_group(prompt) for prompt in prompts]

    def _pop_returned(self, num_samples: int) -> list[Group]:
        groups = self._returned[:num_samples]
        del self._returned[:num_samples]
        self.ledger.fetch(len(groups))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        raise RuntimeError(f"{type(self).__name__} has no buffer to put {len(samples)} groups into")

    def _next_prompts(self, count: int) -> list[Sample]:
        assert self.dataset is not None
        prompts: list[Sample] = []
        while True:
            taken = self.dataset.samples[self.sample_offset : self.sample_offset + count - len(prompts)]
            prompts += taken
            self.sample_offset += len(taken)
            if len(prompts) == count:
                return prompts
            self.epoch_id += 1
            self.sample_offset = 0
            self._shuffle()

    def _make_group(self, prompt: Sample) -> Group:
        group = [copied(prompt, copy.deepcopy) for _ in range(self._generation.batches.n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def _shuffle(self) -> None:
        shuffled = self._generation.rollout.rollout_shuffle
        if self.dataset is not None and (shuffled or self.dataset.weighted):
            self.dataset.arrange(self.epoch_id, shuffled)

    def state_dict(self) -> dict[str, Any]:
        """Position, counters and books as plain data, loadable with ``torch.load(weights_only=True)``."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "ledger": self.ledger.to_dict(),
            "leased": [to_plain(group) for group in [*self.ledger.records.values(), *self._returned]],
            "dataset_length": len(self),
            "origin": self._origin(),
        }

    def _origin(self) -> dict[str, Any]:
        """What the order of prompts follows from, by flag; nothing where there are no prompts."""
        if self.dataset is None:
            return {}
        order: dict[str, Any] = {"--rollout-shuffle": self._generation.rollout.rollout_shuffle}
        if self._generation.rollout.rollout_shuffle:
            order["--rollout-seed"] = self._generation.rollout.rollout_seed
        return order | {"--prompt-data": self.dataset.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``.

        A state of the original's has no books and no number of prompts: what it gave out counts as trained.

        Raises:
            ValueError: the prompts or their order are not those with which the state was saved.
        """
        if state.get("dataset_length", len(self)) != len(self):
            raise ValueError(
                f"--prompt-data {self._generation.data.prompt_data}: {len(self)} prompts, but the run to "
                f"resume had {state['dataset_length']}, so its position {state['sample_offset']} means "
                "nothing here"
            )
        self._check_origin(state.get("origin", {}))
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state.get("metadata") or {}
        self._returned = [from_plain(group) for group in state.get("leased", [])]
        issued = dict(
            issued=self.sample_group_index, trained=self.sample_group_index - self.get_buffer_length()
        )
        books = state.get("ledger") or {**Ledger().to_dict(), **issued}
        self.ledger = Ledger.from_dict(books, self.get_buffer_length())
        self._shuffle()

    def _check_origin(self, saved: dict[str, Any]) -> None:
        for flag, found in self._origin().items():
            wanted = saved.get(flag, found)
            if found != wanted:
                prompts = self._generation.data.prompt_data
                what = f"{prompts}: contents {found}" if flag == "--prompt-data" else found
                raise ValueError(
                    f"{flag} {what}: would repeat prompts or leave some out (wanted: {wanted}, as in the run "
                    "to resume)"
                )

    def save(self, rollout_id: int) -> None:
        if self._generation.checkpoints.save is None:
            return
        with self.ledger.lock:
            state = self.state_dict()
        write_state(state, state_path(self._generation.checkpoints.save, rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        if self._generation.checkpoints.load is None or rollout_id is None or rollout_id < 0:
            return
        path = state_path(self._generation.checkpoints.load, rollout_id)
        if not path.exists():
            raise ValueError(
                f"--load {self._generation.checkpoints.load}: has no data state of rollout {rollout_id} "
                f"(wanted: {path}; or --start-rollout-id 0, which takes the weights and starts the data from "
                "the beginning)"
            )
        self.load_state_dict(read_state(path))


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Gives out groups that were handed back before it takes new prompts. The buffer is saved too.

    ``--buffer-filter-path`` chooses among them; what it removes without returning it is dropped.
    """

    keeps_books = True
    keeps_finished = True

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        path = self._generation.rollout.buffer_filter_path
        self._choose = load_function(path) if path else pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        with self.ledger.lock:
            groups = self._pop_returned(num_samples)
            if self.buffer and len(groups) < num_samples:
                groups += self._choose_buffered(num_samples - len(groups))
            return groups + super().get_samples(num_samples - len(groups))

    def _choose_buffered(self, num_samples: int) -> list[Group]:
        """What the filter returns leaves the buffer, whether it removes it or only selects."""
        path, before = (
            self._generation.rollout.buffer_filter_path,
            {_identity(group) for group in self.buffer},
        )
        try:
            groups = list(self._choose(self.args, None, self.buffer, num_samples))
        except Exception as error:  # of the user's code, which may raise anything, or return nothing
            raise ValueError(f"--buffer-filter-path {path}: {type(error).__name__}: {error}") from error
        chosen = {_identity(group) for group in groups}
        if len(groups) > num_samples:
            raise ValueError(
                f"--buffer-filter-path {path}: returned {len(groups)} groups (wanted: at most {num_samples})"
            )
        if len(chosen) < len(groups) or not chosen <= before:
            raise ValueError(
                f"--buffer-filter-path {path}: returned a group twice, or one that "
                "was not in the buffer (wanted: groups of the buffer, each once)"
            )
        self.buffer[:] = [group for group in self.buffer if _identity(group) not in chosen]
        self.ledger.drop_buffered(len(before) - len(groups) - len(self.buffer), BUFFER_FILTER)
        self.ledger.fetch(len(groups))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        size = self._generation.batches.n_samples_per_prompt
        for group in samples:
            if not isinstance(group, list) or len(group) != size:
                found = f"{len(group)} samples" if isinstance(group, list) else type(group).__name__
                raise ValueError(f"a group is a list of {size} samples, found {found}")
        with self.ledger.lock:
            self.buffer += samples
            self.ledger.put_back(len(samples))

    def get_buffer_length(self) -> int:
        return super().get_buffer_length() + len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"buffer": [to_plain(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = [from_plain(group) for group in state.get("buffer", [])]
        super().load_state_dict(state)


def _identity(group: Group) -> frozenset[int]:
    """Identifies a group by its samples: a filter may wrap them in another list."""
    return frozenset(map(id, group))


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The oldest groups, taken out of the buffer."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups
