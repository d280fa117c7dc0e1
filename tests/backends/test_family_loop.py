"""Every family through the loop of a run, but for Ray: imitation, practice, weights to the engine, practice.

Flags, data, rollout functions, conversion, trainer, weight update and engine are those of ``train.py``; the
engine is a process of its own, asked over HTTP. Runs of a cluster: ``benchmarks/families.py``.
"""

import json

import pytest
import torch

from slime.models import FAMILIES, read_shape
from tests.engines import forked
from tests.families import ALL, chat_family, model_type
from tests.megatron_harness import run_ranks

pytestmark = pytest.mark.slow

SAMPLES = 8
COMMON = [
    *("--fp32", "--num-gpus-per-node", "8", "--seed", "7", "--actor-num-gpus-per-node", "1"),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--global-batch-size", str(SAMPLES)),
    *("--lr", "1e-3", "--weight-decay", "0"),
]
SFT = [
    *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
    *("--loss-type", "sft_loss", "--disable-compute-advantages-and-returns", "--input-key", "messages"),
    *("--num-rollout", "1", "--rollout-batch-size", str(SAMPLES), "--n-samples-per-prompt", "1"),
]
GRPO = [
    *("--colocate", "--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
    *("--custom-rm-path", "tests.e2e.plugins.token_parity_reward", "--rollout-max-response-len", "8"),
    *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
]
R3 = ["--use-rollout-routing-replay", "--use-slime-router"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The files of both kinds of training."""
    path = tmp_path_factory.mktemp("data")
    answers = [{"role": "assistant", "content": str(number**3)} for number in range(SAMPLES)]
    questions = [{"role": "user", "content": f"{number} * {number}"} for number in range(SAMPLES)]
    rows = {
        "sft": [{"messages": list(pair)} for pair in zip(questions, answers, strict=True)],
        "rl": [{"prompt": [question], "label": "1"} for question in questions],
    }
    for name, lines in rows.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _train(worker, args, rollout_id, source):
    """A rollout and what is made of it, as the rollout manager and the trainer's actors do it."""
    from slime.config.run import run_config
    from slime.rollout.base_types import call_rollout_fn
    from slime.rollout.checks import check_samples
    from slime.training.conversion import flatten_samples, samples_to_train_data, split_train_data_by_dp
    from slime.utils.misc import load_function

    function = load_function(args.rollout_function_path)
    output = call_rollout_fn(function, args, rollout_id, source, evaluation=False)
    samples = flatten_samples(output.samples)
    check_samples(args.rollout_function_path, samples)
    config = run_config(args)
    batch = samples_to_train_data(config, samples)
    (shard,) = split_train_data_by_dp(config, batch, worker.parallel_config())
    report, _ = worker.train_shard(rollout_id, shard)
    kept = {name: batch[name] for name in ("tokens", "loss_masks", "response_lengths")}
    versions = sorted({version for sample in samples for version in sample.weight_versions})
    return {**kept, "versions": versions, "step": report["train"][0]}


def _imitate(rank, argv):
    from slime.arguments import validated_args
    from slime.ray.train_worker import TrainWorker
    from slime.utils.misc import load_function

    args = validated_args(argv)
    worker = TrainWorker(args)
    worker.start()
    return _train(worker, args, 0, load_function(args.data_source_path)(args))


def _practise(rank, argv, endpoint):
    from slime.arguments import validated_args
    from slime.arguments.core.runtime_context import with_context
    from slime.ray.train_worker import TrainWorker
    from slime.utils.http_utils import init_http_client
    from slime.utils.misc import load_function
    from slime.utils.types import EngineEndpoint

    port = int(endpoint.rpartition(":")[2])
    args = with_context(validated_args(argv), sglang_router_ip="127.0.0.1", sglang_router_port=port)
    init_http_client(args)
    worker, source = TrainWorker(args), load_function(args.data_source_path)(args)
    worker.start()
    worker.connect_rollout_engines([EngineEndpoint(endpoint, None, 1, 0)])
    rollouts = []
    for rollout_id in range(args.num_rollout):
        if rollout_id:  # the first is of what the engine has read itself
            worker.update_weights()
        rollouts.append(_train(worker, args, rollout_id, source))
    return rollouts


@torch.no_grad()
def _imitation_loss(model, found):
    """Negative log-likelihood of trained tokens, the mean over samples of their means."""
    means = []
    for tokens, mask, length in zip(
        found["tokens"], found["loss_masks"], found["response_lengths"], strict=True
    ):
        logits = model(torch.tensor([tokens])).logits[0, -length - 1 : -1]
        loss = -logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-length:])[:, None])[:, 0]
        means.append(loss[torch.tensor(mask) > 0].mean())
    return float(torch.stack(means).mean())


def test_no_family_is_left_out():
    assert {model_type(family) for family in ALL} >= FAMILIES.keys()


@pytest.mark.parametrize("family", ALL)
def test_a_family_imitates_and_practises(family, data, tmp_path):
    path = tmp_path / "hf"
    model = chat_family(family, path)
    shape = read_shape(path)
    common = [*COMMON, *["--freeze-indexer"] * (shape.indexer is not None), "--hf-checkpoint", str(path)]
    has_experts = shape.moe is not None
    engine = forked.ForkedEngine(
        0, str(path), tmp_path / "engine.log", *["--enable-return-routed-experts"] * has_experts
    )
    try:
        (sft,) = run_ranks(_imitate, 1, [*common, *SFT, "--prompt-data", str(data / "sft.jsonl")])
        engine.wait_ready()
        argv = [*common, *GRPO, *(R3 if has_experts else []), "--prompt-data", str(data / "rl.jsonl")]
        ((first, second),) = run_ranks(_practise, 1, argv, engine.endpoint.url)
    finally:
        engine.end()
    assert sft["step"]["train/loss"] == pytest.approx(_imitation_loss(model, sft), rel=1e-4)
    assert [first["versions"], second["versions"]] == [["default"], ["1"]]
    for step in (sft["step"], first["step"], second["step"]):
        assert 0 < step["train/grad_norm"] < float("inf")
    for rollout in (first, second):
        assert rollout["step"]["train/train_rollout_logprob_abs_diff"] < 1e-5
