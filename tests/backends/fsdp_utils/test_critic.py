"""A critic of the FSDP trainer takes the steps of plain transformers, and goes on where it ended."""

import json

import pytest
import torch
import transformers

from slime.arguments.groups.critic import of_critic
from slime.backends.fsdp_utils.value_head import ValueHead
from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from tests.backends.critic_reference import PPO, transformers_steps
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.backends.fsdp_utils.architectures import model_args, packed_row, rows, save
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split

pytestmark = pytest.mark.slow

WAYS = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "1 rank, padded rows": (
        1,
        {"attn_implementation": "sdpa", "gradient_checkpointing": True},
    ),
    "2 ranks, weights on the host": (2, {"fsdp_cpu_offload": True}),
    "CP 2": (2, {"context_parallel_size": 2}),
}
HEAD = {"value_head.weight", "value_head.bias"}


def critic_args(path, **overrides):
    own = dict(critic_lr=2e-3, critic_lr_warmup_iters=0, critic_load=None, critic_save=None)
    ppo = dict(advantage_estimator="ppo", global_batch_size=4, critic_resumes=False, no_load_optim=None)
    return of_critic(fsdp_args(path, **{**ppo, **own, **PPO, **overrides}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    return {i: random_rollout(vocab_size=256, seed=i) for i in range(2)}


def _run(rank, args, role, rollouts, save_after):
    """Trains on the rollouts that are left; saves after one of them."""
    worker = TrainWorker(args, role)
    start = worker.start()
    before, steps, gives = weights_of(worker), [], {}
    for rollout_id in range(start, len(rollouts)):
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        report, trained = worker.train_shard(rollout_id, shard)
        steps += report.get("train", [])
        gives = dict(zip(shard["sample_indices"], trained.outputs.get("values", []), strict=False))
        if rollout_id == save_after:
            worker.save_model(rollout_id, force_sync=True)
    return {"start": start, "before": before, "steps": steps, "gives": gives, "after": weights_of(worker)}


def expect(results, reference):
    for step, wanted in zip(results[0]["steps"], reference["steps"], strict=True):
        found = {name: step[f"train/critic-{name}"] for name in wanted}
        assert found == pytest.approx(wanted, rel=2e-5, abs=1e-7)
    given = {number: values for result in results for number, values in result["gives"].items()}
    assert sorted(given) == [*range(8)]
    for number, values in given.items():
        torch.testing.assert_close(values, reference["values"][number], rtol=0, atol=1e-5)
    head = {name.replace("output_layer", "value_head"): w for name, w in reference["weights"].items()}
    wanted = {name: weight for name, weight in head.items() if name in HEAD}
    wanted |= {f"model.{name}": weight for name, weight in reference["trunk"].items()}
    for result in results:
        assert result["after"].keys() >= HEAD
        for name, weight in result["after"].items():
            if ".experts." not in name:
                torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_two_steps_agree_with_transformers(way, checkpoint, rollouts):
    world_size, overrides = WAYS[way]
    args = critic_args(checkpoint, **overrides)
    results = run_ranks(_run, world_size, args, "critic", {0: rollouts[0]}, -1)
    expect(results, transformers_steps(checkpoint, rollouts[0]))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_so_do_other_families(family, rollouts, tmp_path):
    path = save_tiny_hf(tmp_path, family)
    results = run_ranks(_run, 2, critic_args(path), "critic", {0: rollouts[0]}, -1)
    expect(results, transformers_steps(path, rollouts[0]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_is_bit_exact(world_size, checkpoint, rollouts, tmp_path):
    place = str(tmp_path)
    args = critic_args(checkpoint, critic_save=place, critic_load=place, critic_resumes=True)
    through = run_ranks(_run, world_size, args, "critic", rollouts, 0)
    resumed = run_ranks(_run, world_size, args, "critic", rollouts, -1)
    for before, after in zip(through, resumed, strict=True):
        assert after["start"] == 1 and after["steps"] == before["steps"][2:]
        for name, weight in before["after"].items():
            assert torch.equal(weight, after["after"][name]), name


def test_the_trunk_comes_from_an_actors_checkpoint_and_the_head_is_new(rollouts, tmp_path):
    path = save_tiny_hf(tmp_path / "hf", "llama")  # whose output layer is a weight of its own
    place = str(tmp_path / "saved")
    (actor,) = run_ranks(_run, 1, fsdp_args(path, save=place), "actor", {0: rollouts[0]}, 0)
    (new,) = run_ranks(_run, 1, critic_args(path), "critic", {}, -1)
    for flag in ("critic_load", "ref_load"):
        (critic,) = run_ranks(_run, 1, critic_args(path, **{flag: place}), "critic", {}, -1)
        assert critic["start"] == 0 and critic["before"].keys() - actor["after"].keys() == HEAD
        for name, weight in critic["before"].items():
            source = new["before"] if name in HEAD else actor["after"]
            assert torch.equal(weight, source[name]), name


@pytest.mark.parametrize("frozen", [["."], ["embed", "norm", r"layers\."]])
def test_a_new_head_trains_whatever_is_frozen(frozen, rollouts, tmp_path):
    path = save_tiny_hf(tmp_path, "llama")
    only = {"only_train_params_name_list": ["lm_head"]} if frozen == ["."] else {}
    flags = only or {"freeze_params_name_list": frozen}
    (result,) = run_ranks(_run, 1, critic_args(path, **flags), "critic", {0: rollouts[0]}, -1)
    moved = {name for name, w in result["before"].items() if not torch.equal(w, result["after"][name])}
    assert moved == HEAD


def test_values_are_float32_in_a_model_of_bfloat16():
    head = ValueHead(64, seed=1)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    values = head.bfloat16()(hidden)
    assert values.dtype == torch.float32
    exact = hidden.double() @ head.weight.double().T + head.bias.double()
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)


def _values(rank, path):
    from slime.backends.fsdp_utils.forward import PackedForward
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.model import build_model

    args = model_args(path)
    mesh, _ = init(run_config(args))
    model = build_model(run_config(args), mesh, "critic")
    load_hf_weights(args, model, path)
    forward = PackedForward(model, "flash_attention_2", torch.device("cpu"))
    forward.choose()
    with torch.no_grad():
        return {"values": forward(packed_row()).clone()}


@pytest.mark.parametrize("architecture", ["GPTNeoX", "Gemma2", "GPT2", "Mamba"])
def test_any_architecture_has_values_and_what_is_done_to_logits_is_not_done_to_them(architecture, tmp_path):
    """Gemma 2 caps its logits, here almost to nothing; trunks and output layers have various names."""
    path = save(tmp_path, architecture)
    config = json.loads((tmp_path / "config.json").read_text())
    if architecture == "Gemma2":
        (tmp_path / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 0.01}))
    (found,) = run_ranks(_values, 1, path)
    trunk = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    head = torch.empty(1, 32).normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parts = [row[None] for row in rows()]
        wanted = torch.cat([trunk(input_ids=part).last_hidden_state @ head.T for part in parts], dim=1)
    torch.testing.assert_close(found["values"], wanted, rtol=1e-4, atol=1e-5)


def _parameters(rank, args):
    worker = TrainWorker(args, "critic")
    worker.start()
    names, params = zip(*worker.backend.state.model.named_parameters(), strict=True)
    return {"names": [*names], "trains": all(param.requires_grad for param in params)}


def test_a_critic_of_an_actor_with_adapters_trains_all_of_its_weights(checkpoint):
    (plain,), (beside,) = (
        run_ranks(_parameters, 1, critic_args(checkpoint, **lora)) for lora in ({}, {"lora_rank": 4})
    )
    assert beside == plain and beside["trains"]
