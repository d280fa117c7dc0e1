"""Each kind of training on SGLang's own servers: trainer and engine say the same about the same tokens.

To start SGLang takes longer than to train: the kinds share a server, which each gives its weights.

What a test measures goes into the report (``--junit-xml``), off which ``benchmarks/sglang_runs.py`` reads it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.rollout.on_policy_distillation import post_process_rewards
from slime.utils.types import Sample
from tests.e2e.conftest import Run
from tests.engines.embedded import make_checkpoint, token_logprobs
from tests.run_args import plugin_args
from tests.sglang_cpu.server import sglang_server
from tests.sglang_cpu.test_runs import ON_CPU
from tools.convert_hf_to_fp8 import main as convert_to_fp8
from tools.convert_hf_to_int4 import main as convert_to_int4

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" not in os.environ, reason="run by scripts/test-sglang.sh"),
]

GAP = "train/train_rollout_logprob_abs_diff"
CLOSE = 1e-5
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
RADIX_TREE = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
OPD = "slime.rollout.on_policy_distillation."
STOPS = range(20, 250, 2)  # half of the tokens end a turn, so that nearly every sample has a second one


@dataclass(frozen=True)
class Kind:
    """What a run of this kind is given.

    Attributes:
        on_policy: how many of its two steps train on tokens of the weights that they start from.
    """

    flags: list[object] = field(default_factory=list)
    script: str = "train.py"
    on_policy: int = 2


KINDS = {
    "fully async": Kind(
        ["--rollout-function-path", FULLY_ASYNC, "--max-staleness", 2], "train_async.py", on_policy=1
    ),
    "fully async, on policy": Kind(["--rollout-function-path", FULLY_ASYNC, "--max-staleness", 0]),
    "streaming": Kind(
        [
            "--custom-generate-function-path",
            "slime.rollout.sglang_streaming_rollout.generate_streaming",
        ]
    ),
    "SlimeRouter, radix tree": Kind(
        [
            *("--use-slime-router", "--slime-router-middleware-paths", RADIX_TREE),
            *("--custom-generate-function-path", "slime.rollout.text_generation.generate"),
        ]
    ),
    "PPO": Kind(["--advantage-estimator", "ppo", "--lambd", 0.95, "--critic-lr", 1e-3]),
    "FSDP": Kind(["--train-backend", "fsdp"]),
    "tools": Kind(
        [
            *("--custom-generate-function-path", "tests.sglang_cpu.plugins.generate_with_a_tool"),
            *("--rollout-stop-token-ids", *STOPS),
        ]
    ),
}


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[object]]:
    """Flags of runs whose engine is the one that all kinds share."""
    with sglang_server(model, tmp_path_factory.mktemp("served") / "server.log") as address:
        yield ["--rollout-engine", "sglang", "--rollout-external-engine-addrs", address]


@pytest.fixture
def trained(start: Any, rl_flags: list[object], tmp_path: Path, record_property: Any) -> Callable[..., Run]:
    """Two steps of a kind, the gap measured and held; the samples of the first rollout are recorded."""

    def train(name: str, kind: Kind, engines: list[object]) -> Run:
        record_property("kind", name)
        recorded = ["--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"]
        flags = [*rl_flags, *engines, *recorded, *kind.flags]
        run: Run = start(flags, script=kind.script).expect_success(timeout=800)
        rows = run.rows("train")
        assert sorted(rows) == [0, 1]
        assert all(row["train/grad_norm"] > 0 for row in rows.values())
        gaps = [rows[step][GAP] for step in range(kind.on_policy)]
        record_property("gap", max(gaps))
        assert max(gaps) < CLOSE
        run.expect_no_processes()
        return run

    return train


@pytest.fixture
def samples(tmp_path: Path) -> Callable[[], list[Sample]]:
    """Returns the samples of the first rollout, once the run has ended."""

    def read() -> list[Sample]:
        recorded = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
        return [Sample.from_dict(sample) for sample in recorded]

    return read


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_run(kind: str, trained, samples, served) -> None:
    trained(kind, KINDS[kind], served)
    if kind == "tools":
        turns = [sample.metadata["round_number"] for sample in samples()]
        assert turns.count(2) > len(turns) / 2


def test_distillation_from_a_teacher_engine(
    trained, samples, served, tmp_path: Path, record_property
) -> None:
    """What the teacher's SGLang says of the student's tokens is what ``transformers`` says of them."""
    teacher = make_checkpoint(tmp_path / "teacher", seed=9)
    with sglang_server(tmp_path / "teacher", tmp_path / "teacher.log") as address:
        asked = ["--rm-url", f"http://{address}/generate", "--custom-rm-path", OPD + "reward_func"]
        flags = [*asked, "--custom-reward-post-process-path", OPD + "post_process_rewards"]
        trained("distillation", Kind(["--use-opd", "--opd-type", "sglang", *flags]), served)
    gap, told = 0.0, samples()
    post_process_rewards(plugin_args(), told)  # the answers were recorded
    for sample in told:
        expected = token_logprobs(teacher, sample.tokens)[-sample.response_length :]
        gap = max(gap, *(abs(a - b) for a, b in zip(sample.teacher_log_probs, expected, strict=True)))
    record_property("teacher_gap", gap)
    assert gap < 10 * CLOSE  # the largest of all tokens, not the mean


def test_routes_of_the_engine_are_replayed(trained, samples, tmp_path: Path) -> None:
    shape = {"mlp_only_layers": [], "tie_word_embeddings": False}
    config = make_checkpoint(tmp_path / "moe", "qwen3_moe", **shape).config
    replay = ["--use-rollout-routing-replay", "--use-slime-router"]
    trained("routing replay", Kind(["--hf-checkpoint", tmp_path / "moe", "--colocate", *replay]), ON_CPU)
    layers, chosen = config.num_hidden_layers, config.num_experts_per_tok
    for sample in samples():
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, layers, chosen)
        assert len(set(map(tuple, sample.rollout_routed_experts[:, 0].tolist()))) > 1


_NO_FLOAT32 = "torch.float32 is not supported for quantization method "
CANNOT_SERVE = {
    "fp8": (convert_to_fp8, "qwen3", _NO_FLOAT32 + "fp8"),
    "int4": (convert_to_int4, "qwen3_moe", _NO_FLOAT32 + "compressed-tensors"),
}


@pytest.mark.parametrize("quantisation", CANNOT_SERVE)
def test_quantised_engines_are_not_served_in_float32(
    quantisation: str, start, rl_flags, tmp_path: Path, record_property
) -> None:
    """And in bfloat16 no gap of rounding alone can be told from another."""
    convert, family, reason = CANNOT_SERVE[quantisation]
    shape = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    make_checkpoint(tmp_path / "plain", family, tie_word_embeddings=False, **shape)
    convert(["--model-dir", str(tmp_path / "plain"), "--save-dir", str(tmp_path / "quantised")])
    run = start([*rl_flags, *ON_CPU, "--hf-checkpoint", tmp_path / "quantised"])
    assert run.wait(800) != 0
    assert reason in run.output
    record_property("kind", f"{quantisation} engines")
    record_property("not_served", reason)
    run.expect_no_processes()
