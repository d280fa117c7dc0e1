"""Adapters of the FSDP trainer train as PEFT trains them, and begin as the Megatron trainer's do."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.fsdp_utils.lora import Adapter
from slime.backends.fsdp_utils.optimizer import local, parameters_of
from slime.ray.train_worker import TrainWorker
from slime.training.versions import REFERENCE, TRAINED
from slime.training.weights import ADAPTER, BASE
from tests.backends.fsdp_harness import fsdp_args
from tests.backends.lora_reference import (
    ALPHA,
    FLAGS,
    RANK,
    base_model,
    expect_close,
    merged_by_hand,
    peft_step,
    save_random,
    tensors_of,
)
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.transformers_step import noisy_rollout

pytestmark = pytest.mark.slow

ROWS_OF_THEIR_OWN = {"attn_implementation": "sdpa", "gradient_checkpointing": True}
LAYOUTS = {
    "1 process": (1, {}),
    "1 process, padded rows, recomputed": (1, ROWS_OF_THEIR_OWN),
    "1 process, alpha / sqrt(rank)": (1, {"lora_use_rslora": True}),
    "DP 2": (2, {}),
    "DP 2, weights on the host": (2, {"fsdp_cpu_offload": True}),
    "CP 2": (2, {"context_parallel_size": 2, "gradient_checkpointing": True}),
}
TEXT = [5, 3, 7, 11, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollout(checkpoint):
    return noisy_rollout(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint, rollout, tmp_path_factory):
    """``reference(use_rslora)``: an adapter of PEFT's that changes the model, and PEFT's own step from it."""
    made = {}

    def reference(use_rslora=False):
        if use_rslora not in made:
            path = save_random(checkpoint, tmp_path_factory.mktemp("adapter"), use_rslora=use_rslora)
            made[use_rslora] = path, peft_step(checkpoint, path, rollout)
        return made[use_rslora]

    return reference


@pytest.fixture(scope="module")
def adapter(reference):
    return reference()[0]


def _step(rank, args, rollout, target):
    """One step from the adapter of the flags; what is sent to engines, exported and kept after it."""
    worker = TrainWorker(args)
    worker.start()
    backend = worker.backend
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    backend.save_hf(target)
    told = worker.text_log_probs(TEXT)
    backend.versions.backup(TRAINED)
    with backend.versions.entered(REFERENCE):
        reference = worker.text_log_probs(TEXT)
    trained = [*parameters_of(backend.state.optimizer)]
    moments = [value for param in trained for value in backend.state.optimizer.state[param].values()]
    copies = [copy for tag in backend.versions.backup_tags for copy in backend.versions.get(tag).values()]
    return {
        "report": report,
        "adapter": tensors_of(backend.weights(ADAPTER)),
        "merged": tensors_of(backend.weights()),
        "base": tensors_of(backend.weights(BASE)),
        "log_probs": told,
        "reference": reference,
        "again": worker.text_log_probs(TEXT),
        "trains": sum(local(param).numel() for param in trained),
        "wants_gradients": sum(local(p).numel() for p in backend.state.model.parameters() if p.requires_grad),
        "moments": sum(local(value).numel() for value in moments if value.dim()),
        "copies": sum(copy.numel() for copy in copies),
        "tags": len(backend.versions.backup_tags),
    }


def _log_probs(model):
    with torch.no_grad():
        chosen = model(input_ids=torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    return chosen.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if LAYOUTS[name][0] > 1 else ()) for name in LAYOUTS]
)
def test_one_step_agrees_with_peft(layout, checkpoint, rollout, reference, tmp_path):
    world_size, overrides = LAYOUTS[layout]
    adapter, wanted = reference(overrides.get("lora_use_rslora", False))
    args = fsdp_args(checkpoint, lora_adapter_path=adapter, **{**FLAGS, **overrides})
    results = run_ranks(_step, world_size, args, rollout, str(tmp_path / "out"))
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    assert step["train/loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    base = base_model(checkpoint)
    size = sum(tensor.numel() for tensor in wanted["adapter"].values())
    for result in results:
        for form in ("adapter", "merged"):
            expect_close(result[form], wanted[form])
        # Nothing of the base moves, and the reference is the base.
        assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in result["base"].items())
        assert result["base"].keys() == result["merged"].keys()
        assert result["reference"] == pytest.approx(_log_probs(base), abs=1e-5)
        assert result["reference"] != pytest.approx(result["log_probs"], abs=1e-2)
        assert result["again"] == result["log_probs"]
        assert result["moments"] == 2 * result["trains"] == 2 * result["wants_gradients"]
        assert result["copies"] == result["tags"] * result["trains"]
    assert sum(result["trains"] for result in results) == size
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    expect_close(load_file(tmp_path / "out" / "adapter_model.safetensors"), wanted["adapter"])
    again = peft.PeftModel.from_pretrained(base_model(checkpoint), tmp_path / "out")
    expect_close(again.merge_and_unload().state_dict(), wanted["merged"])


def _kl_of_first_steps(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    reports = [worker.train_shard(i, split(args, rollout, worker.parallel_config()))[0] for i in range(3)]
    return [report["train"][0]["train/ppo_kl"] for report in reports]


def test_log_probs_before_training_are_those_of_training_bit_for_bit(checkpoint):
    flags = {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 100.0, "lr": 0.01}
    args = fsdp_args(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, **flags)
    (found,) = run_ranks(_kl_of_first_steps, 1, args, random_rollout(256, num_samples=32, seed=5))
    assert found == [0, 0, 0]


def _rounded(rank, args):
    worker = TrainWorker(args)
    worker.start()
    weights = worker.backend.weights()
    merged, lost = tensors_of(weights), weights.rounding
    assert all(bucket for bucket in weights.buckets(1 << 30)) and weights.rounding == lost
    adapter = tensors_of(worker.backend.weights(ADAPTER))
    return {"merged": merged, "adapter": adapter, "lost": lost}


@pytest.mark.slow
def test_each_rank_tells_what_rounding_takes_from_its_rows_of_merged_weights(checkpoint, adapter):
    half = {"params_dtype": torch.bfloat16, "bf16": True}
    results = run_ranks(_rounded, 2, fsdp_args(checkpoint, lora_adapter_path=adapter, **FLAGS, **half))
    base = base_model(checkpoint).bfloat16().state_dict()
    wanted, more = merged_by_hand(base, results[0]["adapter"], ALPHA / RANK, torch.bfloat16)
    for rank, found in enumerate(results):
        lost, added = 0.0, 0.0
        for name, whole in wanted.items():
            assert found["merged"][name].dtype == torch.bfloat16
            assert torch.equal(found["merged"][name], whole), name
            off = (whole - base[name].float() - more[name]).chunk(2)[rank]
            lost, added = lost + off.square().sum(), added + more[name].chunk(2)[rank].square().sum()
        assert 0 < found["lost"] < 0.1
        assert found["lost"] == pytest.approx(float((lost / added) ** 0.5), rel=1e-3)
    assert results[0]["lost"] != results[1]["lost"]


def _start(rank, args, target):
    worker = TrainWorker(args)
    worker.start()
    worker.backend.save_hf(target)
    forms = {"adapter": ADAPTER, "base": BASE}
    return {name: tensors_of(worker.backend.weights(form)) for name, form in forms.items()}


@pytest.mark.slow
def test_an_adapter_begins_as_the_other_trainers_whatever_the_layout(checkpoint, tmp_path):
    flags = dict(lora_rank=RANK, lora_target_modules=["q_proj", "v_proj", "mlp.down_proj"])
    flags |= dict(lora_exclude_modules=[r".*layers\.0\..*"], lora_use_rslora=True)
    (wanted,) = run_ranks(_start, 1, trainer_args(checkpoint, **flags), str(tmp_path / "megatron"))
    (alone,) = run_ranks(_start, 1, fsdp_args(checkpoint, **flags), str(tmp_path / "one"))
    results = run_ranks(
        _start, 2, fsdp_args(checkpoint, **flags, lora_save_merged=True), str(tmp_path / "two")
    )
    for found in (alone, *results):
        for form, tensors in wanted.items():
            assert found[form].keys() == tensors.keys()
            assert all(torch.equal(found[form][name], tensor) for name, tensor in tensors.items())
    config, other = (
        json.loads((tmp_path / place / "adapter_config.json").read_text())
        for place in ("megatron", "two/adapter")
    )
    assert config == other
    # Merged weights are those of the base as long as B is zero.
    merged = load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in wanted["base"].items())
    assert load_file(tmp_path / "two/adapter/adapter_model.safetensors").keys() == alone["adapter"].keys()


def _step_past_a_layer(rank, args, rollout):
    """Takes a step in which a layer's weight is used and the layer is not called; says how that ends."""
    worker = TrainWorker(args)
    worker.start()
    mlp = worker.backend.state.model.model.layers[2].mlp
    mlp.forward = lambda x: torch.nn.functional.linear(mlp.up_proj(x), mlp.down_proj.weight)
    try:
        worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    except ValueError as error:
        return str(error)


def test_an_adapter_that_nothing_computes_ends_the_first_step(checkpoint, rollout):
    args = fsdp_args(checkpoint, lora_target_modules=["q_proj", "down_proj"], **FLAGS)
    (line,) = run_ranks(_step_past_a_layer, 1, args, rollout)
    assert "model.layers.2.mlp.down_proj has an adapter that nothing computes" in str(line)


def _refusal(rank, args):
    try:
        TrainWorker(args).start()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("targets", "changed", "message"),
    [
        (
            ["q_proj"],
            lambda name, tensor: tensor,
            " tensors of modules that are no target, e.g. base_model.model.model.layers.0.mlp.down_",
        ),
        (
            ["all-linear"],
            lambda name, tensor: None if "1.self_attn.k" in name else tensor,
            "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight is missing (wanted: ",
        ),
        (
            ["all-linear"],
            lambda name, tensor: tensor[:-1] if "1.self_attn.k_proj.lora_B" in name else tensor,
            "layers.1.self_attn.k_proj.lora_B.weight has another shape: [31, 4] (wanted: [32, 4] for",
        ),
    ],
    ids=["of more modules", "of fewer", "of another shape"],
)
def test_an_adapter_of_others_is_no_start(checkpoint, adapter, tmp_path, targets, changed, message):
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    made = {name: changed(name, tensor) for name, tensor in tensors.items()}
    kept = {name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((Path(adapter) / "adapter_config.json").read_text())
    args = fsdp_args(checkpoint, lora_adapter_path=str(tmp_path), lora_target_modules=targets, **FLAGS)
    (line,) = run_ranks(_refusal, 1, args)
    assert line.startswith(f"--lora-adapter-path {tmp_path}: ") and message in line


@pytest.mark.parametrize(
    ("trains", "dropout", "drops"), [(True, 0.5, True), (False, 0.5, False), (True, 0.0, False)]
)
def test_dropout_is_for_training_alone(trains, dropout, drops):
    from slime.backends.fsdp_utils.model import prepare_for_gradients
    from slime.config.lora import LoraConfig

    linear = torch.nn.Linear(64, 64)
    adapter = Adapter("layer", linear, LoraConfig(lora_rank=64, lora_dropout=dropout), 1)
    with torch.no_grad():
        adapter.lora_A.copy_(torch.eye(64))
        adapter.lora_B.copy_(torch.eye(64))
    model = torch.nn.Sequential(torch.nn.Dropout(0.9), adapter)
    if trains:
        prepare_for_gradients(model)
    else:
        model.eval()
    given = model(torch.ones(8, 64)) / adapter.scale
    assert set(given.unique().tolist()) == ({0.0, 2.0} if drops else {1.0})
