"""What a record must hold, and the text that a chat template makes of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.data_files import DataError, Records
from slime.utils.data_sources import find_sources
from slime.utils.notes import note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEDIA = ("image", "audio", "input_audio", "input_image", "video")
"""What the types of parts, or the keys that hold them, begin with; chat templates know both."""


@dataclass(frozen=True)
class RecordKeys:
    """The fields of a record; None where a run does without."""

    prompt: str
    label: str | None = None
    tools: str | None = None
    metadata: str | None = None


@dataclass(frozen=True)
class Row:
    """What a record holds, before its prompt is rendered. ``where`` is file and line, for messages."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None


def read_rows(path: str, keys: RecordKeys) -> Iterator[Row]:
    """The records of all sources that a path means, each looked at.

    Raises:
        DataError: see ``find_sources`` and ``Records``; or a field is missing or null, the prompt is neither
            text nor a list of messages or is blank, or metadata or tools are not what they should be.
    """
    for source in find_sources(path):
        for where, record in Records(source.path):
            yield make_row(where, record, keys, source.name)


def make_row(where: str, record: Mapping[str, Any], keys: RecordKeys, source: str | None) -> Row:
    """A record that was looked at; a named source is in its metadata unless the record names one."""
    for key in (keys.prompt, keys.label):
        if key is not None and key not in record:
            raise DataError(f"{where} has no field {key!r} (found: {', '.join(sorted(record))})")
        if key is not None and record[key] is None:
            raise DataError(f"{where}: field {key!r} is null")
    prompt = record[keys.prompt]
    if isinstance(prompt, int) and not isinstance(prompt, bool):
        note(f"field {keys.prompt!r} of the data holds numbers, which prompts have as text")
        prompt = str(prompt)
    _check_prompt(where, keys.prompt, prompt)
    metadata = _parse(where, "metadata", record.get(keys.metadata), dict) if keys.metadata else None
    tools = _parse(where, "tools", record.get(keys.tools), list) if keys.tools else None
    label = record[keys.label] if keys.label else None
    named = {} if source is None else {"source_name": source}
    return Row(where, prompt, label, named | (metadata or {}), tools)


def _check_prompt(where: str, key: str, prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: field {key!r} is blank")
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: field {key!r} is {prompt!r:.40}, expected text or a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {message!r:.80} in field {key!r} is not a message with a role")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and _does_without_content(message)):
            raise DataError(f"{where}: {message!r:.80} in field {key!r} is not a message with content")


def _does_without_content(message: dict[str, Any]) -> bool:
    """Whether a call of a tool, a line of thought or another field stands in for it."""
    return any(value for key, value in message.items() if key != "role")


def _parse(where: str, name: str, value: Any, kind: type) -> Any:
    """A value of that type, perhaps written as JSON; None if there is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name} are not valid JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise DataError(f"{where}: {name} are {type(value).__name__}, expected {wanted}")
    return value


def render_prompt(tokenizer: "PreTrainedTokenizerBase", row: Row, template_kwargs: Mapping[str, Any]) -> str:
    """The prompt with a generation prompt, by the tokenizer's chat template.

    Raises:
        DataError: the template fails, or makes nothing of the prompt.
    """
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=row.tools, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    # Templates are third-party programs; whatever they raise, the user needs to know for which record.
    except Exception as error:
        raise DataError(f"{row.where}: the chat template fails on this prompt ({error})") from error
    if not text:
        raise DataError(f"{row.where}: the chat template makes nothing of this prompt")
    if holds_written_parts(text, messages):
        raise DataError(f"{row.where}: the chat template takes no list of parts as content (wanted: text)")
    return text


def holds_written_parts(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template that knows text alone has written a list of parts down as Python shows it."""
    contents = (message.get("content") for message in messages)
    return any(isinstance(parts, list) and parts and str(parts) in text for parts in contents)


def medium_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """What a part of the content is, as in ``{"type": "image_url", ...}``, if it is no text."""
    for message in messages:
        content = message.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        for part in parts:
            # Columns of parquet give every part the keys of all, with null where it has none.
            names = [part.get("type"), *(key for key, value in part.items() if value is not None)]
            for name in names:
                if isinstance(name, str) and name.startswith(_MEDIA):
                    return name
    return None
