"""Adapters of experts: they train as those of a model of transformers do, and PEFT reads what is exported."""

from contextlib import contextmanager

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.parametrize import register_parametrization

from slime.adapters.peft_format import write_adapter
from slime.config.lora import LoraConfig
from slime.ray.train_worker import TrainWorker
from slime.training.weights import ADAPTER
from tests.backends.lora_reference import ALPHA, EPS, FLAGS, KL, RANK, base_model, expect_close, tensors_of
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.transformers_step import noisy_rollout, transformers_step

pytestmark = pytest.mark.slow

ROUTING = {
    **{"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
    **{"moe_token_dispatcher_type": "alltoall"},
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "1 process": (1, {}),
    "DP 2": (2, {}),
    "EP 2": (2, {"expert_model_parallel_size": 2}),
    "TP 2, ETP 2": (2, {**TP2, "expert_tensor_parallel_size": 2}),
    "TP 2, EP 2": (2, {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "all-gather": (2, {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
}
ALL = ("gate_proj", "up_proj", "down_proj")


class Adapted(torch.nn.Module):
    """What the adapters of all experts of a layer make of a stacked weight [experts, out, in]."""

    def __init__(self, tensors, names):
        super().__init__()
        self.names = names  # by expert, of each projection in the rows of the weight
        self.own = torch.nn.ParameterDict({name.replace(".", "/"): t.clone() for name, t in tensors.items()})
        self.is_on = True

    def forward(self, weight):
        if not self.is_on:
            return weight
        return weight + torch.stack([torch.cat([self._of(*one) for one in rows]) for rows in self.names])

    def _of(self, module, rows, columns):
        part = lambda which: self.own[f"{module}.lora_{which}.weight".replace(".", "/")]
        if f"{module}.lora_A.weight".replace(".", "/") not in self.own:
            return torch.zeros(rows, columns)
        return ALPHA / RANK * part("B") @ part("A")


def reference_of(path, tensors):
    """The model of transformers with these adapters, and a context in which they add nothing."""
    model = base_model(path)
    model.requires_grad_(False)
    every = []
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for stacked, parts in (("gate_up_proj", ALL[:2]), ("down_proj", ALL[2:])):
            count, rows, columns = getattr(experts, stacked).shape
            prefix = f"base_model.model.model.layers.{number}.mlp.experts"
            size = rows // len(parts), columns
            names = [[(f"{prefix}.{expert}.{part}", *size) for part in parts] for expert in range(count)]
            modules = {module for row in names for module, *_ in row}
            mine = {name: t for name, t in tensors.items() if name.rpartition(".lora_")[0] in modules}
            every.append(Adapted(mine, names))
            register_parametrization(experts, stacked, every[-1])

    @contextmanager
    def off():
        for each in every:
            each.is_on = False
        yield
        for each in every:
            each.is_on = True

    return model, off, every


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Experts in each layer: PEFT takes names of theirs for those of all layers."""
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])


@pytest.fixture(scope="module")
def rollout(checkpoint):
    return noisy_rollout(checkpoint)


def random_adapter(checkpoint, path, projections):
    """Writes an adapter of these projections of all experts, which changes the model."""
    generator, config = torch.Generator().manual_seed(3), base_model(checkpoint).config
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for part in projections:
                columns, rows = (inner, hidden) if part == "down_proj" else (hidden, inner)
                prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
                tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=generator)
                tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    write_adapter(path, tensors, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA), str(checkpoint), [])
    return tensors


@pytest.fixture(scope="module")
def references(checkpoint, rollout, tmp_path_factory):
    """By projections: the adapter's directory, and what a step of the reference makes of it."""
    made = {}

    def reference(projections=ALL):
        if projections not in made:
            path = tmp_path_factory.mktemp("adapters") / "adapter"
            model, off, every = reference_of(checkpoint, random_adapter(checkpoint, path, projections))
            step = transformers_step(model, rollout, EPS, KL, off)
            after = {name.replace("/", "."): p.detach() for each in every for name, p in each.own.items()}
            made[projections] = str(path), step | {"adapter": after}
        return made[projections]

    return reference


def _step(rank, args, rollout, target):
    worker = TrainWorker(args)
    worker.start()
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    worker.backend.save_hf(target)
    weights = worker.backend.weights
    return {"report": report, "adapter": tensors_of(weights(ADAPTER)), "merged": tensors_of(weights())}


def _expect_step(results, wanted):
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    assert step["train/loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    for result in results:
        assert result["adapter"].keys() == wanted["adapter"].keys()
        expect_close(result["adapter"], wanted["adapter"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_agrees_with_transformers_and_peft_reads_the_export(
    layout, checkpoint, rollout, references, tmp_path
):
    world_size, overrides = LAYOUTS[layout]
    adapter, wanted = references()
    flags = {**FLAGS, **ROUTING, **overrides, "lora_target_modules": [".*experts.*"]}
    args = trainer_args(checkpoint, lora_adapter_path=adapter, **flags)
    results = run_ranks(_step, world_size, args, rollout, str(tmp_path / "out"))
    _expect_step(results, wanted)
    expect_close(load_file(tmp_path / "out" / "adapter_model.safetensors"), wanted["adapter"])
    ids, base = torch.arange(12)[None] * 5 % 256, base_model(checkpoint)
    read = peft.PeftModel.from_pretrained(base_model(checkpoint), tmp_path / "out")
    merged = base_model(checkpoint)
    merged.load_state_dict(_stacked(results[0]["merged"], merged.state_dict()))
    with torch.no_grad():
        of_base, of_peft, of_merged = (model(input_ids=ids).logits for model in (base, read, merged))
    torch.testing.assert_close(of_peft, of_merged, rtol=0, atol=1e-4)
    assert (of_peft - of_base).abs().max() > 0.1


def _stacked(tensors, wanted):
    """The tensors of a checkpoint as the model of transformers 5 has them."""
    found = {}
    for name, like in wanted.items():
        if name in tensors:
            found[name] = tensors[name]
            continue
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = like  # a tied head
            continue
        place, _, stacked = name.rpartition(".")
        parts = ALL[:2] if stacked == "gate_up_proj" else ALL[2:]
        one = lambda expert, p=place, q=parts: torch.cat([tensors[f"{p}.{expert}.{x}.weight"] for x in q])
        found[name] = torch.stack([one(expert) for expert in range(len(like))])
    return found


@pytest.mark.parametrize("projections", [("down_proj",), ("gate_proj",)])
def test_some_projections_alone_may_have_one(projections, checkpoint, rollout, references, tmp_path):
    adapter, wanted = references(projections)
    flags = {**FLAGS, **ROUTING, **LAYOUTS["TP 2, ETP 2"][1]}
    flags["lora_target_modules"] = [rf".*experts.*\.{part}" for part in projections]
    args = trainer_args(checkpoint, lora_adapter_path=adapter, **flags)
    _expect_step(run_ranks(_step, 2, args, rollout, str(tmp_path / "out")), wanted)


def _go_on(rank, args, rollouts, save_after):
    worker = TrainWorker(args)
    steps = []
    for rollout_id in range(worker.start(), len(rollouts)):
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        if rollout_id == save_after:
            worker.save_model(rollout_id, force_sync=True)
    return {"steps": steps, "adapter": tensors_of(worker.backend.weights(ADAPTER))}


@pytest.mark.parametrize(
    ("layout", "distributed"), [("TP 2, EP 2", True), ("TP 2, EP 2", False), ("EP 2", True)]
)
def test_what_ranks_with_experts_of_their_own_wrote_goes_on_in_other_layouts(
    layout, distributed, checkpoint, tmp_path
):
    rollouts = [random_rollout(256, seed=seed) for seed in range(3)]
    flags = dict(**ROUTING, lora_rank=RANK, lora_target_modules=["all-linear", ".*experts.*"], lr=1e-2)
    flags |= dict(save=str(tmp_path), load=str(tmp_path), use_distributed_optimizer=distributed)
    through = run_ranks(_go_on, 2, trainer_args(checkpoint, **flags, **LAYOUTS[layout][1]), rollouts, 0)
    (wanted,) = [result["steps"] for result in through if result["steps"]]
    for name in ("1 process", "TP 2, ETP 2", layout):
        size, other = LAYOUTS[name]
        resumed = run_ranks(_go_on, size, trainer_args(checkpoint, **flags, **other), rollouts, -1)
        (steps,) = [result["steps"] for result in resumed if result["steps"]]
        for before, after in zip(wanted[-len(steps) :], steps, strict=True):
            assert after == pytest.approx(before, rel=1e-4, abs=1e-6), name
        for key, tensor in through[0]["adapter"].items():
            torch.testing.assert_close(resumed[0]["adapter"][key], tensor, rtol=0, atol=1e-4)


def _begin(rank, args):
    worker = TrainWorker(args)
    try:
        worker.start()
    except ValueError as error:
        return str(error)
    return tensors_of(worker.backend.weights(ADAPTER))


def test_an_adapter_begins_alike_in_every_layout_and_all_linear_has_no_experts(checkpoint):
    flags = dict(**ROUTING, lora_rank=RANK)
    begin = lambda size, **more: run_ranks(_begin, size, trainer_args(checkpoint, **flags, **more))[0]
    named = {"lora_target_modules": ["down_proj"], "lora_exclude_modules": [r".*layers\.1\..*"]}
    alone = begin(1, **named)
    assert len(alone) == 2 * 4 and all(".layers.0.mlp.experts." in name for name in alone)
    for name in ("TP 2, ETP 2", "TP 2, EP 2"):
        other = begin(2, **named, **LAYOUTS[name][1])
        assert other.keys() == alone.keys()
        assert all(torch.equal(other[key], tensor) for key, tensor in alone.items())
    assert not [name for name in begin(1) if ".experts." in name]


def test_experts_are_dropped_out_in_training_alone(checkpoint, rollout, references):
    adapter, wanted = references()
    flags = {**FLAGS, **ROUTING, "lora_target_modules": [".*experts.*"], "lora_dropout": 0.5}
    args = trainer_args(checkpoint, lora_adapter_path=adapter, **flags, **LAYOUTS["TP 2, EP 2"][1])
    results = run_ranks(_with_dropout, 2, args, rollout)
    for first, again, loss in results:
        assert first == again
        assert not loss or loss != pytest.approx(wanted["loss"], rel=1e-3)


def _with_dropout(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    told = [worker.text_log_probs([5, 3, 7, 11]) for _ in range(2)]
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    return [*told, report["train"][0]["train/loss"] if report else 0]


def test_experts_that_have_no_adapter_are_named(checkpoint, tmp_path):
    tiny_family("gpt_oss", tmp_path)
    flags = dict(**ROUTING, lora_rank=RANK, lora_target_modules=["q_proj", ".*experts.*"])
    (stacked,) = run_ranks(_begin, 1, trainer_args(tmp_path, **flags))
    assert "mlp.experts.gate_up_proj, which has no adapter here" in str(stacked)
    (split_up, _) = run_ranks(_begin, 2, trainer_args(checkpoint, **flags, expert_tensor_parallel_size=2))
    assert "--expert-tensor-parallel-size 2: splits model.layers.0.mlp.experts.0.gate_proj, which" in split_up
