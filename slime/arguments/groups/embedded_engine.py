"""Arguments of the embedded engine: the part of SGLang's ``ServerArgs`` that it honours.

Names and defaults are SGLang's, so that ``--sglang-<name>`` on the trainer's command line means the
same with either server. ``args.sglang_<name>`` carries them to the launcher.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime.arguments.core.flag import add_flags, flag, flags_of
from slime.arguments.core.values import bad_values
from slime.config.limits import MAX_SEED


@dataclass
class EmbeddedServerArgs:
    """What ``python -m slime.backends.embedded_engine`` accepts; None lets the engine choose."""

    model_path: str = flag(required=True, help="HF checkpoint directory to serve")
    tokenizer_path: str | None = flag(help="HF tokenizer directory; default model_path")
    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(30000, at_least=1, at_most=65535, help="port to listen on")
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = flag(
        "auto", help="dtype of weights and KV cache; auto is the dtype in config.json"
    )
    device: Literal["cuda", "cpu"] | None = flag(
        help="where the engine computes; default cuda where there is a GPU"
    )
    base_gpu_id: int = flag(0, at_least=0, help="the GPU it computes on, among all of the machine")
    load_format: Literal["auto", "safetensors", "dummy"] = flag(
        "auto", help="how weights are read; dummy initialises them at random"
    )
    tp_size: int = flag(
        1,
        names=("--tp-size", "--tensor-parallel-size"),
        above=0,
        help="tensor-parallel ranks that weights are sent to; on a CPU, one process computes for all of them",
    )
    context_length: int | None = flag(
        above=0, help="longest prompt plus response, in tokens; default from config.json"
    )
    max_running_requests: int | None = flag(above=0, help="requests decoded together at most")
    max_total_tokens: int | None = flag(above=0, help="tokens the KV cache holds at most")
    chunked_prefill_size: int | None = flag(
        at_least=1, also=(-1,), help="prompt tokens of one prefill step at most; -1 for no chunks"
    )
    random_seed: int | None = flag(
        at_least=0, at_most=MAX_SEED, help="seed of sampling for requests that bring none"
    )
    tool_call_parser: (
        Literal[
            "deepseekv3",
            "deepseekv31",
            "glm",
            "glm45",
            "hermes",
            "kimi_k2",
            "llama3",
            "mistral",
            "pythonic",
            "qwen",
            "qwen25",
            "qwen3_coder",
        ]
        | None
    ) = flag(help="how the model writes calls of tools; without it they stay in the text")
    reasoning_parser: (
        Literal[
            "deepseek-r1",
            "deepseek-v3",
            "glm45",
            "interns1",
            "kimi",
            "kimi_k2",
            "mimo",
            "minimax",
            "qwen3",
            "qwen3-thinking",
            "step3",
        ]
        | None
    ) = flag(help="how the model marks its reasoning; without it that stays in the text")
    served_model_name: str | None = flag(help="model name of the OpenAI endpoints; default model_path")
    api_key: str | None = flag(help="key that normal endpoints ask for")
    admin_api_key: str | None = flag(help="key that control endpoints ask for")
    weight_version: str = flag("default", help="version reported until the first weight update")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = flag(
        "warning", help="level of the server's own log"
    )
    enable_deterministic_inference: bool = flag(
        False, help="compute every sequence by itself (seeds are honoured without it too)"
    )
    enable_memory_saver: bool = flag(False, help="free memory on /release_memory_occupation")
    enable_weights_cpu_backup: bool = flag(False, help="keep weights over a release of their memory")
    enable_return_routed_experts: bool = flag(
        False, help="record which experts tokens are routed to, for requests with return_routed_experts"
    )
    enable_lora: bool = flag(
        False, help="serve low-rank adapters that are loaded by request beside the weights"
    )
    max_lora_rank: int | None = flag(at_least=1, help="largest rank of such adapters")
    sampling_mask_max_tokens: int = flag(
        4096, above=0, help="largest top_k of requests with return_sampling_mask"
    )
    skip_tokenizer_init: bool = flag(False, help="load no tokenizer: ids in, ids out")
    enable_metrics: bool = flag(False, help="serve /metrics")
    stream_interval: int = flag(1, above=0, help="tokens between two messages of a stream")
    incremental_streaming_output: bool = flag(False, help="stream deltas instead of the text so far")
    allow_auto_truncate: bool = flag(
        False, help="cut requests that exceed the context instead of refusing them"
    )
    trust_remote_code: bool = flag(False, help="run Python code that comes with the checkpoint")

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None) -> "EmbeddedServerArgs":
        """Parses a command line; prints the problem and exits with code 2 if it is wrong."""
        parser = argparse.ArgumentParser(
            "python -m slime.backends.embedded_engine",
            description="Serves a language model over SGLang's HTTP protocol.",
            allow_abbrev=False,
        )
        specs = flags_of(cls)
        add_flags(parser, specs)
        namespace = parser.parse_args(argv)
        for message in bad_values(namespace, specs):
            parser.error(message)
        return cls(**vars(namespace))
