"""Folders that a URL names, in an object store for instance: what may be in the URL, and what opens it."""

import importlib.util
import os
import re
from typing import Any

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_LOCAL, _S3 = ("file", "local"), ("s3", "s3a")


def is_url(place: str) -> bool:
    return "://" in place


def shown(url: str) -> str:
    """The URL; no more than its scheme where it may hold what is secret."""
    return f"{url.partition('://')[0]}://..." if _tells(url) else url


def bad_url(url: str) -> str | None:
    """Why nothing can be written to a folder of this URL and read elsewhere; None if it may be."""
    scheme, _, rest = url.partition("://")
    if told := _tells(url):
        return f"has {told} in it (wanted: none, credentials are taken from the environment)"
    if not _SCHEME.fullmatch(scheme) or not rest.strip("/") or "//" in rest.rstrip("/"):
        return "is no URL of a folder (wanted: as s3://bucket/run7)"
    if scheme == "memory":
        return "is the memory of one process (wanted: what engines can read, as s3://bucket/run7)"
    if scheme in _S3 and not _has_s3fs():
        return None  # pyarrow, which is always there, has it too
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        return f"what opens it is not installed ({error})"
    except ValueError:
        return f"fsspec has nothing that opens {scheme}:// (wanted: as s3://bucket/run7)"
    return None


def opened(url: str) -> tuple[Any, str]:
    """A file system of fsspec, and the folder's path in it. Listings are not remembered.

    Raises:
        ImportError: what opens it is not installed.
        ValueError: there is nothing that does.
    """
    scheme, _, path = url.rstrip("/").partition("://")
    if scheme in _S3 and not _has_s3fs():
        return ArrowFSWrapper(_s3_of_pyarrow(), skip_instance_cache=True), path
    own = {"auto_mkdir": True} if scheme in _LOCAL else {}
    options = {"use_listings_cache": False, "skip_instance_cache": True, **own}
    return fsspec.core.url_to_fs(url.rstrip("/"), **options)


def _tells(url: str) -> str | None:
    """What a log had better not have."""
    rest = url.partition("://")[2]
    port = rest.partition("/")[0].partition(":")[2]
    if "@" in rest or (port and not port.isdecimal()):
        return "a user or a password"
    if "?" in rest or "#" in rest:
        return "a query"
    return "another URL" if "::" in url or "://" in rest else None


def _s3_of_pyarrow() -> Any:
    """What pyarrow has: credentials and region it takes from the environment itself, but not the address."""
    from pyarrow.fs import S3FileSystem  # loads the AWS SDK

    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    scheme, has_scheme, host = address.rstrip("/").partition("://")
    if not address:
        return S3FileSystem()
    return S3FileSystem(
        endpoint_override=host if has_scheme else scheme, scheme=scheme if has_scheme else None
    )


def _has_s3fs() -> bool:
    return importlib.util.find_spec("s3fs") is not None
