"""Tokens per CPU second of the embedded engine where ``transformers`` computes the model.

    python benchmarks/generic_executor.py                          # families of about 11M parameters
    python benchmarks/generic_executor.py --families glm4 --rounds 1 --new-tokens 16

64 requests at once, prompts of 32 random tokens, float32, one thread, against ``generate`` of the same model
on the same batch, sampling, with log-probs of the sampled tokens. Both take turns, so that other load on the
machine meets both; a ratio is the median over rounds of CPU seconds (user and system of the process that
computes), those of HTTP, scheduling and sampling among them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine_throughput import (  # noqa: E402
    REQUESTS,
    Measurement,
    Server,
    make_prompts,
    measure,
    own_cpu_seconds,
    summarise,
    transformers_generate,
)
from tests.families import tiny_family  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "generic_executor.json"
SIZES = {
    **{"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024},
}
_EIGHT_EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
# What a family has beside that.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4": {},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 64},
    "qwen2_moe": {**_EIGHT_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 256},
    "deepseek_v3": {
        **{**_EIGHT_EXPERTS, "n_routed_experts": 8, "num_key_value_heads": 6, "head_dim": 32},
        **{"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32},
        **{"v_head_dim": 64, "n_shared_experts": 1},
    },
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 128, "sliding_window": 64},
    "qwen3_5_text": {
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64},
        "linear_value_head_dim": 64,
    },
}


def measure_family(family: str, rounds: int, new_tokens: int) -> dict[str, Any]:
    """The engine and ``generate`` in turns."""
    found: dict[str, list[Measurement]] = {"engine": [], "transformers": []}
    with tempfile.TemporaryDirectory() as path:
        model = tiny_family(family, Path(path), **{**SIZES, **FAMILIES[family]})
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        server = Server(path)
        try:
            warm_up = make_prompts(SIZES["vocab_size"], 99)
            server.wave(warm_up, min(new_tokens, 4))
            transformers_generate(model, warm_up, min(new_tokens, 4))
            for index in range(rounds):
                prompts, tokens = make_prompts(SIZES["vocab_size"], index), REQUESTS * new_tokens
                run = lambda prompts=prompts: server.wave(prompts, new_tokens)
                found["engine"].append(measure(tokens, server.cpu_seconds, run))
                run = lambda prompts=prompts: transformers_generate(model, prompts, new_tokens)
                found["transformers"].append(measure(tokens, own_cpu_seconds, run))
        finally:
            server.process.terminate()
            server.process.wait(30)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    summary = summarise(found, others=("transformers",))
    return {"parameters": parameters, "load_average": os.getloadavg()[0], **summary}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {"requests": REQUESTS, "new_tokens": options.new_tokens, "families": {}}
    if options.output.is_file():  # families that are not measured this time keep their figures
        results["families"] = json.loads(options.output.read_text())["families"]
    for family in options.families:
        found = measure_family(family, options.rounds, options.new_tokens)
        results["families"][family] = found
        print(family, found["parameters"], json.dumps({**found["rates"], **found["ratios"]}), flush=True)
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
