"""Answers of the run's engines with the adapter of a tenant."""

import asyncio
from typing import Any

from slime.utils.http_utils import bearer_header, post
from slime_plugins.training_service.schema import Sample

_RETRIES = 2


class EngineSampler:
    """Asks the engines through the router.

    Args:
        url: of the router.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._headers = f"{url}/generate", bearer_header(api_key)

    async def __call__(self, name: str, asked: Sample) -> dict[str, Any]:
        answers = await asyncio.gather(*(self._one(name, asked) for _ in range(asked.num_samples)))
        return {"sequences": answers}

    async def _one(self, name: str, asked: Sample) -> dict[str, Any]:
        body = {
            "input_ids": asked.prompt,
            "sampling_params": asked.sampling_params.for_engine(),
            "return_logprob": True,
            "lora_path": name,
        }
        answer = await post(self._url, body, _RETRIES, self._headers)
        meta = answer["meta_info"]
        drawn = meta["output_token_logprobs"]
        return {
            "tokens": [token for _, token, *_ in drawn],
            "logprobs": [log_prob for log_prob, *_ in drawn],
            "stop_reason": meta["finish_reason"]["type"],
            "weight_version": meta.get("weight_version"),
        }
