"""Whether a run can make prompts of a data file.

Every record is looked at, since a malformed one is better reported now than after hours. Rendering and
counting tokens take longer: only as many prompts get that as it takes to know that the template works and
that one prompt is short enough.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.adapters.named import unnamed
from slime.arguments.core.working_directory import is_elsewhere
from slime.arguments.groups.rewards import bad_reward_type
from slime.arguments.groups.rollout import SFT_ROLLOUT_FUNCTION
from slime.arguments.validate.tokenizer_process import ask
from slime.config.lora import LoraConfig
from slime.config.run import filled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.utils.data import Row


@dataclass(frozen=True)
class Records:
    """A data file, and what a run makes of it.

    Attributes:
        where: the flag or the eval dataset, for messages.
        keys: fields of the prompt, the label, the tools and the metadata.
        template: arguments of the chat template; None where prompts are not rendered.
        longest: tokens that a prompt may have.
        conversations: prompts are whole conversations to be imitated.
        answered: prompts go to the engines as they are.
        scored: rewards are given by the type that flags or metadata name.
        instructed: rewards are for following the instructions that the metadata name.
        named: whether the metadata must name an adapter, of several.
        least: how many there have to be, and the flag that wants them.
    """

    where: str
    path: str
    keys: tuple[str, str | None, str | None, str | None]
    template: Mapping[str, Any] | None
    longest: int | None
    conversations: bool = False
    answered: bool = False
    scored: bool = False
    instructed: bool = False
    named: bool = False
    least: tuple[int, str] = (0, "")


@lru_cache(maxsize=1)
def tokenizer_of(path: str, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """The tokenizer of ``--hf-checkpoint``, loaded once for all the looks of one command line."""
    from slime.utils.processing_utils import load_tokenizer  # imports transformers

    return load_tokenizer(path, trust_remote_code)


def has_tokenizer(path: str) -> bool:
    """Whether a directory holds what a tokenizer is made of; ``--check`` goes without."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
    return any((Path(path) / file).is_file() for file in files)


def bad_records(args: Namespace, records: Records) -> Iterator[str]:
    """The first record that cannot be used, or what is wrong with all of them."""
    yield from _elsewhere(records)
    from slime.utils.data import DataError, RecordKeys, read_rows  # imports numpy

    count, fits, teaches = 0, records.longest is None, not records.conversations
    readable = not args.check or has_tokenizer(args.hf_checkpoint)
    try:
        for count, row in enumerate(read_rows(records.path, RecordKeys(*records.keys)), 1):
            for problem in _problems(args, records, row):
                yield f"{records.where}: {row.where}: {problem}"
            teaches = teaches or _has_answer(row)
            if not readable:
                fits = True
            elif count == 1 or not fits:
                length = _measured(args, records, row)
                fits = records.longest is None or length <= records.longest
    except (DataError, OSError) as error:
        yield f"{records.where}: {error}"
        return
    least, flag = records.least
    if count < least:
        yield (
            f"{flag}: {records.where} has {count} prompts, fewer than --rollout-batch-size {least} "
            "(wanted: --num-rollout, or more)"
        )
    if not fits:
        wanted = f"no prompt of at most {records.longest} tokens among {count} records"
        yield f"{records.where}: {records.path}: {wanted}"
    if not teaches:
        wanted = f"no message of an assistant in field {records.keys[0]!r} of {count} records"
        yield f"{records.where}: {records.path}: {wanted}, so there is nothing to learn"


def _elsewhere(records: Records) -> Iterator[str]:
    """Lists the sources of a file that the processes of the run would look for elsewhere."""
    from slime.utils.data import DataError
    from slime.utils.data_sources import find_sources

    if not is_elsewhere():
        return
    with suppress(DataError):  # told when it is read
        for source in find_sources(records.path):
            if source.name is not None and not os.path.isabs(source.path):
                yield (
                    f"{records.where} {records.path}: source {source.name!r} has path {source.path}, which "
                    "is another file in processes of the cluster at RAY_ADDRESS (wanted: an absolute path)"
                )


def _problems(args: Namespace, records: Records, row: "Row") -> Iterator[str]:
    from slime.utils.data_rows import medium_of

    key = records.keys[0]
    if records.scored:
        yield from bad_reward_type("rm_type of its metadata", row.metadata.get("rm_type"), args.rm_url)
    if records.instructed and not (row.metadata.get("instruction_id_list") or row.metadata.get("rm_type")):
        found = ", ".join(sorted(row.metadata)) or "nothing"
        yield (
            f"its metadata have no instruction_id_list (found: {found}; --metadata-key names the field, "
            f"now {records.keys[3]!r}), so that ifbench cannot score an answer"
        )
    if records.named and (reason := unnamed(filled(LoraConfig, args), row.metadata)):
        yield reason
    if isinstance(row.prompt, str):
        if records.conversations:
            yield f"field {key!r} is text (wanted: a list of messages; --input-key names the field)"
    elif records.answered and records.template is None:
        yield f"field {key!r} is a list of messages (wanted: --apply-chat-template, or text)"
    elif (records.conversations or records.template is not None) and (medium := medium_of(row.prompt)):
        yield f"field {key!r} has a part of type {medium!r} (wanted: text; other inputs are not supported)"


def _has_answer(row: "Row") -> bool:
    return not isinstance(row.prompt, str) and any(m["role"] == "assistant" for m in row.prompt)


def _measured(args: Namespace, records: Records, row: "Row") -> int:
    """Measures like `_length`, by the process that has a tokenizer if there is one."""
    names = ("hf_checkpoint", "trust_remote_code", "loss_mask_type")
    needed = Namespace(**{name: getattr(args, name) for name in names})
    # Code that comes with a checkpoint may import torch, which is hidden there.
    found = None if args.trust_remote_code else ask(_length, needed, records, row)
    return _length(args, records, row) if found is None else found


def _length(args: Namespace, records: Records, row: "Row") -> int:
    """Tokens of a prompt as the engine will get it; 0 for one that is not measured.

    Raises:
        DataError: the chat template or the tokenizer fails on it.
    """
    from slime.utils.data import DataError, render_prompt

    tokenizer = tokenizer_of(args.hf_checkpoint, args.trust_remote_code)
    if records.conversations:
        _mask(args, tokenizer, row.where, row.prompt, row.tools)
        return 0
    text = row.prompt if records.template is None else render_prompt(tokenizer, row, records.template)
    if not isinstance(text, str):
        return 0
    try:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # its files may hold anything
        raise DataError(f"{row.where}: the tokenizer fails on this prompt ({error})") from error


def _mask(args: Namespace, tokenizer: Any, where: str, messages: Any, tools: list[Any] | None) -> None:
    from slime.utils.data import DataError
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    try:
        MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type).get_loss_mask(messages, tools)
    except Exception as error:  # templates are third-party programs, which may raise anything
        reason = f"--loss-mask-type {args.loss_mask_type} fails on this conversation ({error})"
        raise DataError(f"{where}: {reason}") from error


def imitates(args: Namespace) -> bool:
    """Whether the run is SFT by the built-in rollout function."""
    return args.rollout_function_path == SFT_ROLLOUT_FUNCTION
