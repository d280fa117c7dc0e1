"""What a notebook calls, under the names of Tinker's public API.

client = ServiceClient("http://127.0.0.1:8890")  # with the key in SLIME_API_KEY
training = client.create_lora_training_client("alice")
training.forward_backward(data, "cross_entropy").result()
training.optim_step(learning_rate=1e-4).result()
sampling = training.save_weights_and_get_sampling_client()
sampling.sample([1, 2, 3], max_tokens=16).result()["sequences"][0]["tokens"]
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from slime.utils.addresses import API_KEY
from slime.utils.http_utils import bearer_header

Answer = dict[str, Any]


class ServiceError(RuntimeError):
    """The service refused; the message is its own."""


class _Asking:
    def __init__(self, http: httpx.Client, name: str, workers: int) -> None:
        self._http, self.name = http, name
        self._pool = ThreadPoolExecutor(workers)

    def _ask(self, what: str, **body: Any) -> "Future[Answer]":
        return self._pool.submit(self._answer, what, body)

    def _answer(self, what: str, body: Answer) -> Answer:
        answer = self._http.post(f"/tenants/{self.name}/{what}", json=body)
        if answer.is_error:
            raise ServiceError(f"{what} of {self.name}: HTTP {answer.status_code}: {answer.text[:2000]}")
        found: Answer = answer.json()
        return found


class SamplingClient(_Asking):
    """Samples with the weights that the tenant has saved for the sampler last; requests run side by side."""

    def sample(self, prompt: Sequence[int], num_samples: int = 1, **params: Any) -> "Future[Answer]":
        """``params`` are the fields of `schema.SamplingParams`."""
        return self._ask("sample", prompt=list(prompt), num_samples=num_samples, sampling_params=params)


class TrainingClient(_Asking):
    """Trains a tenant: requests are sent in order, one after the other, and each is a future."""

    def forward_backward(
        self,
        data: Sequence[Mapping[str, Any]],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> "Future[Answer]":
        """``data`` are dicts of the form of `schema.Datum`."""
        config = dict(loss_fn_config or {})
        return self._ask("forward_backward", data=list(data), loss_fn=loss_fn, loss_fn_config=config)

    def optim_step(self, **adam: float) -> "Future[Answer]":
        """``adam`` are the fields of `schema.AdamParams`."""
        return self._ask("optim_step", **adam)

    def save_state(self, name: str) -> "Future[Answer]":
        return self._ask("save_state", name=name)

    def load_state(self, name: str, of: str | None = None) -> "Future[Answer]":
        return self._ask("load_state", name=name, of=of)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """Waits until engines have the weights."""
        self._ask("save_weights_for_sampler").result()
        return SamplingClient(self._http, self.name, 64)


class ServiceClient:
    """The service at a URL.

    Args:
        api_key: of the service; SLIME_API_KEY of the environment by default.
        timeout_s: of one request, its wait for other tenants' included.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 3700.0) -> None:
        headers = bearer_header(api_key or os.environ.get(API_KEY))
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def create_lora_training_client(self, name: str) -> TrainingClient:
        """A client of one of the service's tenants."""
        return TrainingClient(self._http, name, 1)
