"""One step of a critic is the same in every parallel layout, and in plain transformers with torch's AdamW."""

import pytest
import torch

from slime.backends.megatron_utils.named_params import named_params
from slime.ray.train_worker import TrainWorker
from tests.backends.critic_reference import PPO, transformers_steps
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import critic_args, random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

LAYOUTS = {
    "1 process": (1, {}),
    "TP 2": (2, {"tensor_model_parallel_size": 2}),
    "TP 2 + SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "PP 2 + VPP 2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "DP 2": (2, {}),
    "CP 2": (2, {"context_parallel_size": 2}),
}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
NOT_BALANCED = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
LAYOUTS_OF_EXPERTS = {
    "EP 2": (2, EP2 | ALL_TO_ALL),
    "EP 2, all-gather, TP 2 + SP": (2, EP2 | LAYOUTS["TP 2 + SP"][1]),
    "ETP 2": (2, LAYOUTS["TP 2 + SP"][1] | ALL_TO_ALL),
    "EP 2, CP 2": (2, EP2 | ALL_TO_ALL | LAYOUTS["CP 2"][1]),
    "PP 2 + VPP 2": LAYOUTS["PP 2 + VPP 2"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollout():
    return random_rollout(vocab_size=256)


@pytest.fixture(scope="module")
def reference(checkpoint, rollout):
    return transformers_steps(checkpoint, rollout)


def _critic_steps(rank, args, rollout):
    worker = TrainWorker(args, "critic")
    worker.start()
    shard = split(args, rollout, worker.parallel_config())
    report, trained = worker.train_shard(0, shard)
    params = {name: p.detach().clone() for name, p in named_params(worker.backend.state.model)}
    return {
        "report": report,
        "weights": {name: p for name, p in params.items() if name.startswith(("output", "decoder.final"))},
        "gives": dict(zip(shard["sample_indices"], trained.outputs.get("values", []), strict=False)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_agree_with_transformers(layout, checkpoint, rollout, reference):
    world_size, overrides = LAYOUTS[layout]
    _expect(
        run_ranks(_critic_steps, world_size, critic_args(checkpoint, **PPO, **overrides), rollout), reference
    )


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_so_do_other_families(family, rollout, tmp_path):
    checkpoint = save_tiny_hf(tmp_path, family)
    results = run_ranks(_critic_steps, 1, critic_args(checkpoint, **PPO), rollout)
    _expect(results, transformers_steps(checkpoint, rollout))


@pytest.fixture(scope="module")
def experts(rollout, tmp_path_factory):
    """A mixture of experts, and the steps of its critic."""
    path = save_tiny_hf(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    return path, transformers_steps(path, rollout)


@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS)
def test_so_does_a_mixture_of_experts(layout, experts, rollout):
    world_size, overrides = LAYOUTS_OF_EXPERTS[layout]
    path, reference = experts
    args = critic_args(path, **PPO, **NOT_BALANCED, **overrides)
    _expect(run_ranks(_critic_steps, world_size, args, rollout), reference)


def _expect(results, reference):
    (report,) = [result["report"] for result in results if result["report"]]
    for step, expected in zip(report["train"], reference["steps"], strict=True):
        found = {name: step[f"train/critic-{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert report["train"][1]["train/critic-value_clipfrac"] > 0
    assert len(report["train"]) == 2
    assert {"perf/critic-steps_time", "perf/critic-values_time"} <= report["perf"].keys()
    given = {number: values for result in results for number, values in result["gives"].items()}
    assert sorted(given) == [*range(8)]
    for number, values in given.items():
        torch.testing.assert_close(values, reference["values"][number], rtol=0, atol=1e-5)
    named = [(n, w) for result in results for n, w in result["weights"].items()]
    assert {name for name, _ in named} == reference["weights"].keys()
    for name, weight in named:
        torch.testing.assert_close(weight, reference["weights"][name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_float32_whatever_the_weights_are(dtype, checkpoint, rollout, reference):
    scaling = dict(initial_loss_scale=2.0**8, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=1)
    half = dict(params_dtype=dtype, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, **scaling)
    args = critic_args(checkpoint, **PPO, **half, loss_scale=None, **LAYOUTS["TP 2 + SP"][1])
    results = run_ranks(_critic_steps, 2, args, rollout)
    for number, values in results[0]["gives"].items():
        assert values.dtype == torch.float32 and not torch.equal(values, values.to(dtype).float())
        torch.testing.assert_close(values, reference["values"][number], rtol=0, atol=0.05)
    (report,) = [result["report"] for result in results if result["report"]]
    for step, expected in zip(report["train"], reference["steps"], strict=True):
        assert step["train/critic-value_loss"] == pytest.approx(expected["value_loss"], rel=0.1)


def _actor_step(rank, args, rollout, given):
    worker = TrainWorker(args)
    worker.start()
    return worker.train_shard(0, split(args, rollout, worker.parallel_config()), given[rank])[0]


@pytest.fixture(scope="module")
def actor_reports(checkpoint, rollout):
    """Per layout, what actors report that were given the values of critics of the same layout."""
    reports = {}
    for layout, (world_size, overrides) in LAYOUTS.items():
        critics = run_ranks(_critic_steps, world_size, critic_args(checkpoint, **PPO, **overrides), rollout)
        given = [{"values": [*result["gives"].values()]} if result["gives"] else {} for result in critics]
        flags = dict(advantage_estimator="ppo", normalize_advantages=True, global_batch_size=4)
        args = trainer_args(checkpoint, **{**PPO, **flags, **overrides})
        results = run_ranks(_actor_step, world_size, args, rollout, given)
        (reports[layout],) = [report for report in results if report]
    return reports


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_actor_with_values_takes_the_same_steps(layout, actor_reports):
    found, expected = actor_reports[layout], actor_reports["1 process"]
    assert {"rollout/values", "rollout/advantages", "rollout/returns"} <= found["rollout"].keys()
    assert found["rollout"] == pytest.approx(expected["rollout"], rel=1e-4, abs=1e-6)
    first, *later = zip(found["train"], expected["train"], strict=True)
    assert first[0] == pytest.approx(first[1], rel=1e-4, abs=1e-6)
    for mine, wanted in later:
        # Adam's first step moves a weight by the whole rate, whatever rounding says of a gradient near 0.
        assert mine == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"only_train_params_name_list": [r"layers\.3\."]},
        {"freeze_params_name_list": [r"layers\.[0-2]\.", "embedding", "final_layernorm", "output_layer"]},
    ],
)
def test_a_new_head_trains_whatever_is_frozen(flags, checkpoint, rollout):
    (result,) = run_ranks(
        _critic_steps, 1, critic_args(checkpoint, **PPO, **flags, global_batch_size=8), rollout
    )
    names = [name for name in result["weights"] if name.startswith("output_layer")]
    head = torch.empty(1, 64).normal_(0, 0.02, generator=torch.Generator().manual_seed(1234))
    assert len(names) == 2 and not torch.equal(result["weights"]["output_layer.weight"], head)
    assert result["weights"]["output_layer.bias"] != 0
