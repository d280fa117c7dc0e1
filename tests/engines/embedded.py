"""Tiny random checkpoints, and real embedded engines over them in processes of their own."""

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import torch
import transformers

from tests.engines import free_port
from tests.forking import ForkedScript, forking
from tools.make_tiny_model import make_tokenizer

CONTEXT = 16384
ENDLESS = CONTEXT - 384
"""New tokens of a request that is to be still running whenever a test looks; making them takes 10 s."""
LONG = 2000
"""New tokens of a request that runs on while a test does a thing or two, and is then waited for."""
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 258,
}
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "mlp_only_layers": [1],
}


def make_model(family: str, seed: int = 0, **overrides):
    """A random float32 model whose every parameter, norms and biases included, matters."""
    shape = {**SHAPE, "tie_word_embeddings": family == "qwen3", **overrides}
    if family != "qwen2":
        shape.setdefault("head_dim", 16)
    if family == "qwen3_moe":
        shape = EXPERTS | shape
    config = getattr(transformers, FAMILIES[family] + "Config")(**shape)
    torch.manual_seed(seed)
    model = getattr(transformers, FAMILIES[family] + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(0.3 * noise if "norm" in name else 0.06 * noise)
    return model


def make_checkpoint(path: Path, family: str = "qwen3", seed: int = 0, **overrides):
    """Saves a model and a byte-level tokenizer; returns the model."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model


def token_logprobs(model, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[1:], by ``transformers``."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class _ExplainingTransport(httpx.HTTPTransport):
    """Adds to an error of the connection how the server is and what it wrote last."""

    def __init__(self, server: "Server") -> None:
        super().__init__()
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            error.add_note(self._server.report())
            raise


class Server:
    """``python -m slime.backends.embedded_engine``, forked; a client for it, and its log in a file."""

    def __init__(self, model_path: Path | str, *flags: str, env: dict[str, str] | None = None) -> None:
        forking()  # before a port is chosen
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._log = tempfile.NamedTemporaryFile(prefix="embedded_engine_", suffix=".log")  # noqa: SIM115
        self._ready = False
        words = ["--model-path", str(model_path), "--port", str(port), *flags]
        module = "slime.backends.embedded_engine"
        self.process = ForkedScript(module, words, self._log.name, env={**threads, **(env or {})})
        self.client = httpx.Client(base_url=self.url, timeout=600, transport=_ExplainingTransport(self))

    def wait_ready(self, timeout: float = 600) -> "Server":
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(self.report())
            try:
                if self.client.get("/health").status_code == 200:
                    self._ready = True
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        raise TimeoutError(f"no answer within {timeout} s; {self.report()}")

    def report(self, lines: int = 40) -> str:
        """Exit status and the end of the log."""
        if self._ready:
            # a process that crashed loses its connections a little before it can be collected
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        status = self.process.poll()
        state = "is running" if status is None else f"exited with {status}"
        tail = Path(self._log.name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"the server at {self.url} {state}; its log ends with:", *tail])

    def post(self, path: str, **body):
        return self.client.post(path, json=body)

    def generate(self, ids: list[int], sampling: dict | None = None, **body):
        response = self.post("/generate", input_ids=ids, sampling_params=sampling or {}, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
