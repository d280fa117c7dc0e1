"""Write docs/conformance.md from the list of requests and differences that the conformance tests go by.

python tools/generate_conformance_docs.py           # write the page
python tools/generate_conformance_docs.py --check   # exit with 1 if it would change
"""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.backends.sglang_utils.comparison import Note, Request, read_list  # noqa: E402
from tools.generated_page import table, write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
HEADER = ("where", "SGLang", "embedded engine", "why")
INTRODUCTION = """# The embedded engine beside SGLang

The embedded engine speaks the HTTP protocol of SGLang 0.5.23: where the two differ, and why. One suite of tests runs against
both.

<!-- Made by tools/generate_conformance_docs.py of tests/backends/sglang_utils/conformance.yaml. -->

```bash
bash scripts/conformance.sh                          # the embedded engine
bash scripts/conformance.sh http://127.0.0.1:30000   # and the SGLang that serves there
bash scripts/test-sglang.sh                          # installs SGLang, serves it on the CPU, trains with it
```

The SGLang has to serve a small float32 checkpoint directory of the same machine, without an API key. The suite passes on SGLang
0.5.23 on a CPU, weight updates included. Log-probs agree to 1e-5.

`scripts/test-sglang.sh` also trains with SGLang on the CPU, two steps of each kind of run (layouts, rollout functions, PPO, FSDP,
tools, distillation, replayed routes, adapters, changes over a directory), and kills schedulers during updates. Log-probs of trainer
and engine are less than 1e-5 apart as long as tokens are those of the weights that a step starts from
(`python benchmarks/sglang_runs.py` writes `benchmarks/results/sglang_runs.json`). Quantised engines are not among them: SGLang
serves float8 and 4-bit checkpoints in bfloat16 and float16 only.

After updates by handle, from rank to rank, over a process group and over a directory each tensor of SGLang's, of engines of one rank
and of two, has the checksum of the trainer's numbers, joined as SGLang joins them (`tests/sglang_cpu/test_weights.py`). An SGLang with a key that
[follows a trainer](usage.md#engines-of-others-that-follow) and generates meanwhile, in each `--pause-generation-mode`, then gives the
log-probs of the trainer's weights, and the tokens of an SGLang started from them (`tests/sglang_cpu/test_followed.py`). While a
request is held in place a later prompt takes over a prefix that older weights have computed; under an `extra_key` of the
version it does not, nor once the engine was idle. Several adapters, loaded in memory and
named per request, give the log-probs of PEFT's model, each its own, and a name that is not there never those of the base.

## One script for both

`--sglang-*` options that say how SGLang uses its GPUs (memory, kernels, graphs, drafting, parallel
attention) have no effect on the embedded engine, and a note says so. Options that change what is served, as
`--sglang-lora-paths`, are refused there.

## Grammars

`json_schema`, `regex`, `ebnf` and `structural_tag`, and the `response_format` of chats and completions, are kept to with
`xgrammar`, in the version that SGLang pins. Without the package such requests are answered with 400; `scripts/` install it, else
`pip install --no-deps xgrammar apache-tvm-ffi` does.

Tokens that may not come next have no weight, and log-probs are those of what is left, as on SGLang. A process of its own compiles,
in at most 20 s of processor time and 4 GiB: what is too large costs its request, not the engine. What xgrammar accepts and does not
hold to (`uniqueItems`, `multipleOf`, `not`, ...) is refused, as on SGLang.

## Tools and reasoning

Chats take `tools`, `tool_choice` (`auto`, `none`, `required`, a function), `parallel_tool_calls`, messages
of tools and calls of the assistant, and answer with `tool_calls` and `finish_reason: tool_calls`. Names of
parsers are SGLang's:

| flag | names |
|---|---|
| `--sglang-tool-call-parser` | `deepseekv3`, `deepseekv31`, `glm` and `glm45`, `hermes`, `kimi_k2`, `llama3`, `mistral`, `pythonic`, `qwen` and `qwen25`, `qwen3_coder` |
| `--sglang-reasoning-parser` | `deepseek-r1`, `deepseek-v3`, `glm45`, `interns1`, `kimi`, `kimi_k2`, `mimo`, `minimax`, `qwen3`, `qwen3-thinking`, `step3` |

Others (`gpt-oss` among them) are refused by name. A call that must come is forced by a grammar, in the
model's own format where it has one that can be forced. With a reasoning parser a grammar holds once the
reasoning has ended.

Calls that are well formed are read as SGLang reads them (`tests/backends/embedded_engine/tool_calls`, which `record.py` there
writes anew where SGLang is installed). What a model wrote is never evaluated.
"""  # noqa: E501
COMPARED = """## What is different

`tests/backends/sglang_utils/conformance.yaml` lists {requests} requests, `sglang_answers.json` beside it
what SGLang answers to them. Each difference between the answers is on that list with its reason: one that
is not, and one that is there no more, fails `test_comparison.py`.
"""
DEADLY = """## What ends SGLang's scheduler

Whoever sends one of these to SGLang 0.5.23 ends the server. The embedded engine answers 400, and
`slime.utils.http_utils.post` and `stream` do not send them to the run's own servers: they raise
`DeadlyRequest`, lest a router hand the request from one engine to the next.
"""
BEYOND = """## Beyond single requests

These take more than one request to see, or another model, or another command line.
"""


def rows(entries: Iterable[Request | Note]) -> list[tuple[str, str, str, str]]:
    """A row of a table for each."""
    return [(entry.about, entry.sglang, entry.embedded, entry.why) for entry in entries]


def conformance_page() -> str:
    """The whole page."""
    requests, notes = read_list()
    deadly = ", ".join(request.about for request in requests if request.kills)
    sections = [
        INTRODUCTION,
        COMPARED.format(requests=len(requests)),
        table(HEADER, rows(request for request in requests if request.differs)),
        DEADLY,
        deadly[0].upper() + deadly[1:] + ".\n",
        BEYOND,
        table(HEADER, rows(notes)),
    ]
    return "\n".join(sections)


def main() -> int:
    """Writes or checks the page."""
    return write_or_check(PAGE, conformance_page(), "generate_conformance_docs.py")


if __name__ == "__main__":
    raise SystemExit(main())
