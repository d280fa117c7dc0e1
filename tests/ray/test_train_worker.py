"""A trainer process from its flags to its metrics, dumps and exports."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.observability import gpu_use, logging_utils
from slime.observability.timer import Timer
from slime.ray import train_worker
from slime.ray.train_worker import TrainRayActor, TrainWorker
from slime.training.trainer import Trained
from slime.utils.accelerator import PeakMemory
from slime.utils.types import EngineEndpoint
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.run_args import config_with
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.weight_sync.test_handle import Recorder
from tools.convert_hf_to_fp8 import main as to_fp8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _train(rank, args, num_rollouts=1):
    worker = TrainWorker(args)
    worker.start()
    config = worker.parallel_config()
    reports = []
    for rollout_id in range(num_rollouts):
        reports.append(
            worker.train_shard(rollout_id, split(args, random_rollout(256, seed=rollout_id), config))[0]
        )
        worker.sleep()
        worker.wake_up()
    if args.save_hf:
        worker.save_model(0)
    return {"reports": reports}


def _as_on_gpus(rank, args):
    """Two GPUs, of which one has more in tensors and the other more in its allocator."""
    gpu_use.take_peak_memory = lambda device: PeakMemory((2 + rank) << 30, (4 - rank) << 30)
    gpu_use.device_name = lambda device: "NVIDIA H100 80GB HBM3"
    return _train(rank, args)


def test_a_step_reports_the_fullest_gpu_and_the_part_of_its_peak(checkpoint):
    results = run_ranks(_as_on_gpus, 2, trainer_args(checkpoint))
    (perf,) = [report["perf"] for result in results for report in result["reports"] if report]
    assert (perf["perf/memory_allocated_gib"], perf["perf/memory_reserved_gib"]) == (3, 4)
    assert perf["perf/actor_train_mfu"] == perf["perf/actor_train_tflops"] / 989.4


def _is_deterministic(rank, args):
    TrainWorker(args).start()
    return torch.are_deterministic_algorithms_enabled()


def _main_reports(args, world_size=1, num_rollouts=1):
    results = run_ranks(_train, world_size, args, num_rollouts)
    (reports,) = [r["reports"] for r in results if r["reports"][0]]
    return reports


# The engine of random rollouts is no engine.
CHECKED = {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 100.0}


def another_policy(args, rollout_id, rollout_data):
    rollout_data["log_probs"] = [values + 1e-4 for values in rollout_data["log_probs"]]


def test_a_run_under_test_ends_if_its_first_step_is_off_policy(checkpoint):
    path = f"{__name__}.another_policy"
    with pytest.raises(RuntimeError, match=r"--ci-test: train/ppo_kl .* wanted at most 1e-08"):
        _main_reports(trainer_args(checkpoint, rollout_data_postprocess_path=path, **CHECKED))


def test_the_first_step_starts_on_policy(checkpoint):
    (report,) = _main_reports(trainer_args(checkpoint, **CHECKED))
    (step,) = report["train"]
    assert "rollout/log_probs" in report["rollout"]  # without, ppo_kl is 0 by construction
    assert step["train/ppo_kl"] == 0
    assert {"train/grad_norm", "train/lr-pg_0", "train/train_rollout_logprob_abs_diff"} <= step.keys()
    assert step["train/lr-pg_0"] == 1e-3 and step["train/global_batch_size"] == 8
    assert {"perf/train_time", "perf/actor_train_time", "perf/actor_train_tflops"} <= report["perf"].keys()
    assert not any("mfu" in name or "memory" in name for name in report["perf"])


def test_a_step_that_needs_no_pass_before_it_reports_what_the_pass_would(checkpoint):
    (without,) = _main_reports(trainer_args(checkpoint))
    (passed,) = _main_reports(trainer_args(checkpoint, use_rollout_entropy=True))
    for name in ("rollout/log_probs", "rollout/entropy"):
        assert without["rollout"][name] == pytest.approx(passed["rollout"][name], rel=1e-5), name
    assert not any("own_log_probs" in name for step in without["train"] for name in step)


def _sends(rank, args, endpoint):
    worker = TrainWorker(args)
    worker.start()
    worker.connect_rollout_engines([endpoint])
    worker.update_weights()


def test_engines_of_a_quantised_checkpoint_are_sent_its_tensors(checkpoint, tmp_path):
    """The trainer starts with the weights of --ref-load, which the checkpoint stands for."""
    quantised = str(tmp_path / "fp8")
    assert to_fp8(["--model-dir", checkpoint, "--save-dir", quantised, "--block-size", "16", "16"]) == 0
    args = trainer_args(quantised, ref_load=checkpoint, synced_checkpoint=quantised, colocate=True)
    engine = Recorder()
    engine.start()
    try:
        run_ranks(_sends, 1, args, EngineEndpoint(engine.url, None, 1, 0))
    finally:
        engine.stop()
    wanted = load_file(f"{quantised}/model.safetensors")
    assert engine.weights[0].keys() == wanted.keys()
    assert all(torch.equal(engine.weights[0][name], tensor) for name, tensor in wanted.items())


class _Engines:
    def run(self, version):
        return 0


def _ages(rank, args, versions, updates):
    """Mean age in each rollout of tokens of ``versions``; engines are updated after those in ``updates``."""
    worker = TrainWorker(args)
    worker.start()
    worker._update = _Engines()
    worker.update_weights()
    ages = []
    for rollout_id, version in enumerate(versions):
        batch = random_rollout(256)
        batch["token_versions"] = [[version] * length for length in batch["response_lengths"]]
        report, _ = worker.train_shard(rollout_id, split(args, batch, worker.parallel_config()))
        ages.append(report["rollout"]["rollout/staleness/mean"])
        if rollout_id in updates:
            worker.update_weights()
    return ages


@pytest.mark.parametrize(
    ("versions", "updates", "ages"),
    [
        pytest.param((1, 2, 3), (0, 1, 2), [0, 0, 0], id="synchronous"),
        pytest.param((1, 1, 2), (0, 1, 2), [0, 1, 1], id="one rollout ahead"),
        # The second rollout trains weights that no engine has seen.
        pytest.param((1, 1, 1, 2), (1, 3), [0, 1, 1, 1], id="an update every two rollouts"),
    ],
)
def test_the_age_of_tokens_counts_from_the_weights_that_are_trained(checkpoint, versions, updates, ages):
    assert run_ranks(_ages, 1, trainer_args(checkpoint), versions, updates) == [ages]


def test_without_engines_tokens_have_no_age(checkpoint):
    (report,) = _main_reports(trainer_args(checkpoint))
    assert not any("staleness" in name for name in report["rollout"])


def test_deterministic_mode_is_torchs_too(checkpoint):
    (report,) = _main_reports(trainer_args(checkpoint, deterministic_mode=True))
    (usual,) = _main_reports(trainer_args(checkpoint))
    assert report["train"][0]["train/grad_norm"] == usual["train"][0]["train/grad_norm"]
    assert run_ranks(_is_deterministic, 1, trainer_args(checkpoint, deterministic_mode=True)) == [True]


LAYOUTS = [
    pytest.param(1, {}, id="1 process"),
    pytest.param(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="TP 2"),
    pytest.param(2, {"pipeline_model_parallel_size": 2}, id="PP 2"),
    pytest.param(2, {}, id="DP 2"),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_log_probs_of_both_passes_agree(checkpoint, world_size, layout):
    """Two steps need log-probs computed beforehand; the reference model is the policy itself."""
    flags = {"global_batch_size": 4, "use_kl_loss": True, "kl_loss_coef": 0.1, "use_rollout_entropy": True}
    args = trainer_args(checkpoint, **flags, **layout)
    (report,) = _main_reports(args, world_size)
    first, second = report["train"]
    assert first["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert first["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert abs(second["train/ppo_kl"]) > 1e-6 and second["train/kl_loss"] > 1e-6
    rollout = report["rollout"]
    assert rollout["rollout/log_probs"] == pytest.approx(rollout["rollout/ref_log_probs"], abs=1e-6)
    assert rollout["rollout/entropy"] == pytest.approx(first["train/entropy_loss"], rel=0.2)
    batch = random_rollout(256)
    assert rollout["rollout/rewards"] == pytest.approx(sum(batch["rewards"]) / 8)
    assert rollout["rollout/response_lengths"] == pytest.approx(sum(batch["response_lengths"]) / 8)
    assert rollout["rollout/total_lengths"] == pytest.approx(sum(map(len, batch["tokens"])) / 8)


def test_the_reference_follows_at_its_interval(checkpoint):
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "lr": 1e-2, "ref_update_interval": 2}
    args = trainer_args(checkpoint, **flags)
    kl = [report["train"][0]["train/kl_loss"] for report in _main_reports(args, num_rollouts=3)]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] > 1e-4
    assert kl[2] == pytest.approx(0, abs=1e-6)


SFT = {"loss_type": "sft_loss", "compute_advantages_and_returns": False}


def _repeated(rank, args, times):
    """The loss of each of some optimizer steps on the same samples."""
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, random_rollout(256), worker.parallel_config())
    return [worker.train_shard(i, shard)[0]["train"][0]["train/loss"] for i in range(times)]


def test_sft_starts_at_the_models_own_loss_and_lowers_it_with_each_step(checkpoint):
    args = trainer_args(checkpoint, **SFT, calculate_per_token_loss=True)
    (losses,) = run_ranks(_repeated, 1, args, 4)
    model, batch = transformers.AutoModelForCausalLM.from_pretrained(checkpoint), random_rollout(256)
    surprises = []
    for tokens, mask in zip(batch["tokens"], batch["loss_masks"], strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logits = model.float()(ids[None]).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        surprises.append(-log_probs[-len(mask) :][torch.tensor(mask) == 1])
    assert losses[0] == pytest.approx(float(torch.cat(surprises).mean()), rel=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]


def test_sft_has_no_metrics_of_a_policy(checkpoint):
    (report,) = _main_reports(trainer_args(checkpoint, **SFT))
    (step,) = report["train"]
    assert not {"train/ppo_kl", "train/pg_loss", "train/entropy_loss"} & step.keys()


def test_layouts_report_the_same_per_token_loss(checkpoint):
    flags = {"loss_type": "sft_loss", "calculate_per_token_loss": True}
    args = trainer_args(checkpoint, compute_advantages_and_returns=False, **flags)
    (one,), (two,) = _main_reports(args), _main_reports(args, world_size=2)
    for key in ("train/loss", "train/grad_norm"):
        assert two["train"][0][key] == pytest.approx(one["train"][0][key], rel=1e-5)


def postprocess(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [torch.full_like(a, 2.0) for a in rollout_data["advantages"]]
    logging_utils.log(args, {"rollout/own": 0.5}, step_key="rollout/step")


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    with Path(args.calls).open("a") as file:
        file.write(f"step {rollout_id} {step_id}\n")
    logging_utils.log(args, {"train/own": 0.25, "train/step": step_id}, step_key="train/step")


def before_log_prob(args, model, store_prefix):
    with Path(args.calls).open("a") as file:
        file.write(f"log-prob {store_prefix!r}\n")


def test_hooks_are_called_and_the_dump_holds_what_was_trained_on(checkpoint, tmp_path):
    args = trainer_args(
        checkpoint,
        calls=str(tmp_path / "calls"),
        rollout_data_postprocess_path=f"{__name__}.postprocess",
        custom_megatron_before_train_step_hook_path=f"{__name__}.before_step",
        custom_megatron_before_log_prob_hook_path=f"{__name__}.before_log_prob",
        save_debug_train_data=str(tmp_path / "dump" / "{rollout_id}.pt"),
        save_debug_log_probs=True,
    )
    (report,) = _main_reports(args)
    assert report["train"][0]["train/pg_loss"] == pytest.approx(-2.0, rel=1e-5)
    assert report["train"][0]["train/own"] == 0.25 and report["rollout"]["rollout/own"] == 0.5
    calls = Path(args.calls).read_text().splitlines()
    assert calls == ["log-prob ''", "log-prob 'before_'", "step 0 0", "log-prob 'after_'"]
    dump = torch.load(tmp_path / "dump" / "0.pt", weights_only=True)
    (shard,) = dump["shards"]
    assert dump["rollout_id"] == 0 and shard["advantages"][0][0] == 2.0
    assert len(shard["log_probs"]) == len(shard["after_log_probs"]) == 8
    columns = (shard[f"{prefix}log_probs"] for prefix in ("", "before_", "after_"))
    for values, before, after in zip(*columns, strict=True):
        assert torch.equal(values, before) and not torch.equal(before, after)


def test_frozen_parameters_keep_their_values(checkpoint, tmp_path):
    flags = {"only_train_params_name_list": ["final_layernorm"], "save_hf": str(tmp_path / "{rollout_id}")}
    _main_reports(trainer_args(checkpoint, **flags))
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (checkpoint, tmp_path / "0")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.norm.weight"}


def write_moments(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """Before a step: the largest entry of each moment, and the step count."""
    (part,) = optimizer.chained_optimizers
    states = [state for state in part.optimizer.state.values() if state]
    largest = {key: max((float(s[key].abs().max()) for s in states), default=0.0) for key in MOMENTS}
    steps = {group.get("step", 0) for group in part.optimizer.param_groups if group["params"]}
    with Path(args.moments).open("a") as file:
        file.write(json.dumps({"at": [rollout_id, step_id], **largest, "steps": [*steps]}) + "\n")


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(("reset", "steps"), [(True, [0, 1, 0, 1]), (False, [0, 1, 2, 3])])
def test_a_reset_of_the_optimizer_forgets_moments_and_steps_before_each_rollout(
    checkpoint, tmp_path, reset, steps
):
    hook = {"custom_megatron_before_train_step_hook_path": f"{__name__}.write_moments"}
    flags = {"reset_optimizer_states": reset, "global_batch_size": 4, "moments": str(tmp_path / "moments")}
    _main_reports(trainer_args(checkpoint, **hook, **flags), num_rollouts=2)
    rows = [json.loads(line) for line in (tmp_path / "moments").read_text().splitlines()]
    assert [row["at"] for row in rows] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [row["steps"] for row in rows] == [[step] for step in steps]
    for moment in MOMENTS:
        assert [row[moment] > 0 for row in rows] == [step > 0 for step in steps]


def test_training_in_bfloat16_stays_near_float32(checkpoint):
    (exact,) = _main_reports(trainer_args(checkpoint, entropy_coef=0.1))
    (rounded,) = _main_reports(
        trainer_args(checkpoint, entropy_coef=0.1, params_dtype=torch.bfloat16, bf16=True)
    )
    for key in ("train/entropy_loss", "train/grad_norm"):
        assert rounded["train"][0][key] == pytest.approx(exact["train"][0][key], rel=0.1)


def _train_with_one_that_teaches_nothing(rank, args, has_response):
    worker = TrainWorker(args)
    worker.start()
    batch = random_rollout(256)
    response = batch["response_lengths"][0]
    batch["rollout_mask_sums"][0] = 0
    batch["loss_masks"][0] = [0] * response
    if not has_response:
        batch["tokens"][0] = batch["tokens"][0][:-response]
        batch["response_lengths"][0] = 0
        batch["loss_masks"][0], batch["rollout_log_probs"][0] = [], []
    return worker.train_shard(0, split(args, batch, worker.parallel_config()))[0]["train"]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "reinforce_plus_plus"])
def test_a_sample_without_a_response_counts_as_one_whose_response_is_masked(checkpoint, estimator):
    flags = {"advantage_estimator": estimator, "normalize_advantages": estimator != "grpo"}
    # One sample per micro-batch, so that one of them has no row at all.
    args = trainer_args(checkpoint, max_tokens_per_gpu=1, use_dynamic_batch_size=True, **flags)
    ((without,),) = run_ranks(_train_with_one_that_teaches_nothing, 1, args, False)
    ((masked,),) = run_ranks(_train_with_one_that_teaches_nothing, 1, args, True)
    assert without == pytest.approx(masked, rel=1e-5, abs=1e-7)
    assert without["train/grad_norm"] > 0


def test_a_rank_trains_on_the_shard_of_its_data_parallel_rank_and_what_its_own_rank_was_given(monkeypatch):
    """Rank 3 of TP 2 has the second shard, as rank 2 does, and values of its own."""
    seen = []

    class Actor(TrainRayActor):
        def __init__(self, collector=None):
            self._config, self._role = config_with(rank=3, otlp_endpoint=collector), MagicMock(outputs=())
            self._timer = Timer()

        def parallel_config(self):
            return {"dp_rank": 1}

        def train_shard(self, *given):
            for name in ("log_probs", "actor_train"):
                with self._timer.measure(name):
                    pass
            seen.append(given)
            return {}, Trained([])

    monkeypatch.setattr(train_worker.ray, "get", lambda ref: f"what {ref} refers to")
    _, _, spans = Actor().train(5, ["shard 0", "shard 1"], [f"values {rank}" for rank in range(4)])
    assert [span.name for span in spans] == ["log_probs"]  # by which ranks are compared, without --trace too
    _, _, spans = Actor("http://collector").train(
        5, ["shard 0", "shard 1"], [f"values {rank}" for rank in range(4)]
    )
    assert [span.name for span in spans] == ["log_probs", "actor_train"]
    del seen[0]
    Actor().train(6, ["shard 0", "shard 1"])
    values = "what values 3 refers to"
    assert seen == [(5, "what shard 1 refers to", values), (6, "what shard 1 refers to", None)]


class _Weights(train_worker.WeightUpdate):
    """An update that reaches nobody."""

    def __init__(self, *args, **options):
        self.calls, self.versions = [], []

    def take_over(self):
        self.calls.append("take over")

    def connect(self, endpoints):
        self.calls.append("connect")

    def run(self, version):
        self.versions.append(version)
        return 0


@pytest.mark.parametrize(("torn", "wanted"), [(False, 8), (True, 9)])
def test_versions_go_on_above_those_of_ranks_that_were_lost(monkeypatch, torn, wanted):
    """A checkpoint is older than what the engines have; a version that ended half-way is not used again."""
    monkeypatch.setattr(train_worker, "WeightUpdate", _Weights)
    worker = TrainWorker.__new__(TrainWorker)
    worker._config = config_with(synced_checkpoint=None)
    worker._timer, worker.backend, worker._update, worker._weight_version = Timer(), MagicMock(), None, 5
    worker._tenants = None
    worker.go_on(7, torn)
    worker.connect_rollout_engines([])
    assert worker.update_weights() == (wanted, 0)
    assert worker._update.versions == [wanted] and worker._update.calls == ["take over", "connect"]
