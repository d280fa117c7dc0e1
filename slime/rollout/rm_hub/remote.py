"""``--rm-type remote_rm``: a reward model behind an HTTP endpoint."""

from collections.abc import Sequence
from typing import Any

import httpx
import orjson
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from slime.config.rewards import RewardConfig
from slime.utils.allowed_hosts import require_listed
from slime.utils.redaction import without_secrets
from slime.utils.types import Sample

_TIMEOUT_S = 120.0
_WAIT_AND_ASK_AGAIN = (408, 425, 429)  # request timeout, too early, too many requests
_BODY_CHARACTERS = 500


async def remote_rm(args: RewardConfig, sample: Sample, max_retries: int = 10) -> Any:
    """The JSON that ``--rm-url`` answers to {prompt, response, label}; tried ``max_retries`` times.

    A request that the server calls wrong (4xx but 408, 425 and 429) is not sent again.
    """
    return await post_to_reward_model(args, sample, sample.response, max_retries)


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: not if the server says that the request is wrong."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in _WAIT_AND_ASK_AGAIN
    return not isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL)


def _raise_for_status(answer: httpx.Response, url: str) -> None:
    """httpx's own message holds the whole address, with the token that may stand in it."""
    if not answer.is_success:
        body = answer.text[:_BODY_CHARACTERS]
        message = f"--rm-url {without_secrets(url)}: HTTP {answer.status_code}: {body}"
        raise httpx.HTTPStatusError(message, request=answer.request, response=answer)


async def post_to_reward_model(
    args: RewardConfig, sample: Sample, response: str, max_retries: int = 10
) -> Any:
    """Asks the reward model about a response that differs from the sample's, its boxed answer for
    instance.
    """
    if args.rm_url is None:
        raise ValueError("--rm-url: not given, expected the address that remote_rm asks")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    return await post_json(args.rm_url, payload, max_retries, args.allowed_hosts)


async def post_json(
    url: str, payload: dict[str, Any], max_retries: int = 10, allowed_hosts: Sequence[str] | None = None
) -> Any:
    """The JSON that an address answers; a request that it calls wrong is not sent again.

    A redirect is an error: it may lead to another host.

    Raises:
        HostRefused: ``--allowed-hosts`` has not its host.
    """
    require_listed(url, allowed_hosts, "--rm-url")

    @retry(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(max_retries),
        wait=wait_exponential(multiplier=1, max=30) + wait_random(0, 1),
        reraise=True,
    )
    async def post() -> Any:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False) as client:
            answer = await client.post(
                url, content=orjson.dumps(payload), headers={"Content-Type": "application/json"}
            )
        _raise_for_status(answer, url)
        return answer.json()

    return await post()


async def score(args: RewardConfig, sample: Sample, response: str) -> Any:
    return await post_to_reward_model(args, sample, response)
