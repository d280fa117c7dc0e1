"""Engines that someone else runs: where they are, and what a run with them cannot be told."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from slime.utils.addresses import is_loopback
from slime.utils.worker_url import spelling, worker_url


def external_addresses(addresses: Sequence[str] | None) -> list[str]:
    """The URLs that ``--rollout-external-engine-addrs`` stands for."""
    return [_url(address) for address in addresses or ()]


def _url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def bad_external(args: Namespace) -> Iterator[str]:
    """Addresses that are none, and flags for engines of our own."""
    urls = external_addresses(args.rollout_external_engine_addrs)
    if not urls:
        yield "--rollout-external: needs --rollout-external-engine-addrs"
    for given, url in zip(args.rollout_external_engine_addrs or (), urls, strict=True):
        if not _is_address(url):
            # Whatever stands before an @ may be a password.
            _, secret, place = given.rpartition("@")
            shown = f"...@{place}" if secret else given
            yield f"--rollout-external-engine-addrs {shown}: wanted host:port"
        elif list(map(spelling, urls)).count(spelling(url)) > 1:
            yield f"--rollout-external-engine-addrs {given}: is there twice"
        elif not is_loopback(urlsplit(url).hostname or "") and not getattr(args, "sglang_api_key", None):
            yield (
                f"--rollout-external-engine-addrs {given}: can be reached by others "
                "(wanted: --sglang-api-key, with which the engine was started)"
            )
    if args.colocate:
        yield "--rollout-external: the trainer shares no GPUs with these engines (wanted: without --colocate)"


def _is_address(url: str) -> bool:
    return worker_url(url) is not None and urlsplit(url).port is not None
