"""Images and videos that a conversation names by URL, fetched before a library reads them.

Libraries that read media fetch what a URL names from wherever it leads, the machine's own services among it.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.utils.allowed_hosts import HostRefused, hosts_of_run
from slime.utils.remote_files import fetch

_KEYS = ("image", "image_url", "video")
_READ_AS_THEY_ARE = ("file", "data")


def with_media_fetched(messages: Any, allowed_hosts: Sequence[str] | None, directory: Path) -> Any:
    """The messages with a PIL image in the place of an image's URL, and a file in that of a video's.

    Args:
        messages: a conversation, or several.
        allowed_hosts: see `slime.utils.allowed_hosts`; None for those of the run.
        directory: takes the videos.

    Raises:
        HostRefused: a URL leads where nothing may be fetched from, or is of another kind.
        FetchError: see `slime.utils.remote_files.fetch`.
    """
    if isinstance(messages, list):
        return [with_media_fetched(message, allowed_hosts, directory) for message in messages]
    if not isinstance(messages, Mapping) or not isinstance(messages.get("content"), list):
        return messages
    parts = [_fetched_part(part, allowed_hosts, directory) for part in messages["content"]]
    return {**messages, "content": parts}


def _fetched_part(part: Any, allowed_hosts: Sequence[str] | None, directory: Path) -> Any:
    if not isinstance(part, Mapping):
        return part
    given = {key: part[key] for key in _KEYS if key in part}
    return {**part, **{key: _fetched(key, value, allowed_hosts, directory) for key, value in given.items()}}


def _fetched(key: str, value: Any, allowed_hosts: Sequence[str] | None, directory: Path) -> Any:
    if isinstance(value, list | tuple):  # the frames of a video
        return [_fetched("image", frame, allowed_hosts, directory) for frame in value]
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme = value.partition(":")[0].lower()
    if scheme in _READ_AS_THEY_ARE:
        return value
    if scheme not in ("http", "https"):
        raise HostRefused(f"{key} of a prompt: a URL of the kind {scheme!r} (wanted: http, https or file)")
    what = f"{key} of a prompt"
    content = fetch(value, hosts_of_run(what) if allowed_hosts is None else allowed_hosts, what)
    if key == "video":
        file = directory / f"{len(list(directory.iterdir()))}.video"
        file.write_bytes(content)
        return str(file)
    from PIL import Image

    return Image.open(io.BytesIO(content))
