"""The server that the conformance tests talk to, and what they compare it with."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.backends.sglang_utils.client import EngineClient
from slime.utils.http_client import KEEPALIVE_S
from slime.utils.types import EngineEndpoint
from tests.engines.embedded import ENDLESS

PROMPT = [40, 41, 42, 43, 44, 45]


class EngineUnderTest:
    """A server with a small fp32 model on this machine: the embedded engine, or a real SGLang."""

    def __init__(self, url: str, is_embedded: bool = True) -> None:
        self.url, self.is_embedded = url, is_embedded
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        self.http = httpx.Client(base_url=url, timeout=600, limits=limits, trust_env=False)
        self.client = EngineClient(EngineEndpoint(url, None, 1, None), timeout=600)
        self.pool = ThreadPoolExecutor(16)
        self.model_path = self.client.model_info()["model_path"]
        """The checkpoint it was started with; an update from disk changes what /model_info says."""

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.client.close()
        self.http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def generate(self, prompt: Any = PROMPT, /, *, top: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """The answer to a request for these ids (or lists of ids); ``top`` holds its top-level fields."""
        response = self.try_generate(prompt, top=top, **sampling)
        assert response.status_code == 200, response.text
        return response.json()

    def try_generate(
        self, prompt: Any = PROMPT, /, *, top: dict[str, Any] | None = None, **sampling: Any
    ) -> httpx.Response:
        field = "text" if isinstance(prompt, str) else "input_ids"
        params = {"max_new_tokens": 4, "ignore_eos": True, **sampling}
        body = {field: prompt, "sampling_params": params, "return_logprob": True, **(top or {})}
        return self.post("/generate", **body)

    def start_generating(self, max_new_tokens: int = ENDLESS, **top: Any) -> "Future[Any]":
        """A request in the background, returned once the server works on it."""
        before = self.num_running()
        future = self.pool.submit(self.generate, PROMPT, top=top, max_new_tokens=max_new_tokens)
        self.wait_until(lambda: self.num_running() > before or future.done())
        return future

    def num_running(self) -> int:
        return sum(load["num_running_reqs"] for load in self.client.loads()["loads"])

    def wait_until(self, condition: Any, timeout: float = 600.0) -> None:
        retry = retry_if_result(lambda holds: not holds)
        Retrying(stop=stop_after_delay(timeout), wait=wait_fixed(0.02), retry=retry)(condition)

    @contextmanager
    def paused(self, mode: str) -> Iterator[None]:
        self.client.pause_generation(mode)
        try:
            yield
        finally:
            self.client.continue_generation()

    @cached_property
    def reference(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.model_path)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(Path(self.model_path) / "model.safetensors")

    def expected_logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids), vocab] log-probs of the token after each position, natural log."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits / temperature, dim=-1)

    def assert_logprobs(self, prompt: list[int], answer: dict[str, Any], temperature: float = 1.0) -> None:
        """The answer's log-probs are the reference model's for the same tokens, within 1e-4."""
        ids = answer["output_ids"]
        triples = answer["meta_info"]["output_token_logprobs"]
        assert [triple[1] for triple in triples] == ids
        table = self.expected_logprobs(prompt + ids, temperature)[len(prompt) - 1 : -1]
        expected = table.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([triple[0] for triple in triples]), expected, atol=1e-4, rtol=0
        )


def in_thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
