"""One step of the FSDP trainer is one step of the Megatron trainer."""

import pickle
import sys
from pathlib import Path

import pytest
import torch

from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args, train, weights_of
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

# Old log-probs around the model's, a reference, ratios, clipping, an entropy bonus: all of the policy loss.
LOSS = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "use_tis": True, "tis_clip": 1.5}
BATCHES = {
    "dynamic": {},
    "micro-batch 1": {"use_dynamic_batch_size": False, "micro_batch_size": 1},
    # So much decay that it shows which parameters decay.
    "micro-batch 2": {"use_dynamic_batch_size": False, "micro_batch_size": 2, "weight_decay": 5.0},
    "per token": {"calculate_per_token_loss": True, "lr_decay_style": "cosine", "lr_warmup_iters": 1},
    "two steps": {"global_batch_size": 4, "advantage_estimator": "gspo", "clip_grad": 0.0},
}
WHOLE_SEQUENCES = {
    "GSPO": {"advantage_estimator": "gspo", "global_batch_size": 4},
    "OPSM": {"use_opsm": True, "opsm_delta": 1e-3, "calculate_per_token_loss": True, "global_batch_size": 4},
}
OPTIMIZERS = {
    "SGD": {"optimizer": "sgd", "sgd_momentum": 0.8, "lr": 0.05},
    "SGD without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.05, "weight_decay": 2.0},
    "Adam, decay in the gradient": {"decoupled_weight_decay": False, "weight_decay": 2.0},
}
CP2 = {"context_parallel_size": 2}
FSDP = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks, checkpointing": (2, {"gradient_checkpointing": True}),
    "1 rank, padded rows": (1, {"attn_implementation": "sdpa", "gradient_checkpointing": True}),
    "2 ranks, eager": (2, {"attn_implementation": "eager"}),
    "2 ranks, weights on the host": (2, {"fsdp_cpu_offload": True}),
    "CP 2": (2, CP2),
    "CP 2, contiguous, checkpointing": (2, CP2 | {"allgather_cp": True, "gradient_checkpointing": True}),
    "CP 2 x DP 2": (4, CP2),
}
# What a rank does with other weights than the trained ones.
VERSIONS = {
    "moving reference": {"use_kl_loss": True, "kl_loss_coef": 0.5, "ref_update_interval": 1},
    "old actor": {"keep_old_actor": True, "ref_update_interval": 2},
    "old actor and moving reference of adapters": {
        **{"keep_old_actor": True, "ref_update_interval": 1, "use_kl_loss": True, "kl_loss_coef": 0.5},
        **{"lora_rank": 4, "lr": 0.02},
    },
    "teacher": {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.7},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    return [random_rollout(256, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def megatron(checkpoint, rollouts):
    """The outcome of the Megatron trainer, computed once for each kind of batch."""
    outcomes = {}

    def outcome(batches):
        if batches not in outcomes:
            kinds = {**BATCHES, **OPTIMIZERS, **WHOLE_SEQUENCES}
            args = trainer_args(checkpoint, **{**LOSS, **kinds[batches]})
            (outcomes[batches],) = run_ranks(train, 1, args, rollouts)
        return outcomes[batches]

    return outcome


def assert_same(found, wanted, rounding=1e-8):
    tolerance = 1e-5
    for (steps, rollout), (wanted_steps, wanted_rollout) in zip(
        found["reports"], wanted["reports"], strict=True
    ):
        assert rollout == pytest.approx(wanted_rollout, rel=tolerance, abs=rounding)
        for step, wanted_step in zip(steps, wanted_steps, strict=True):
            assert step.keys() == wanted_step.keys()
            assert step == pytest.approx(wanted_step, rel=tolerance, abs=rounding)
            # Adam makes much of the last bits of gradients that are almost 0.
            tolerance = 1e-3
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], weight, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_steps_equal_those_of_megatron_for_any_batches(ranks, batches, checkpoint, rollouts, megatron):
    world_size, overrides = FSDP[ranks]
    args = fsdp_args(checkpoint, **LOSS, **BATCHES[batches], **overrides)
    results = run_ranks(train, world_size, args, rollouts)
    assert_same(results[0], megatron(batches))
    assert all(torch.equal(w, results[-1]["weights"][n]) for n, w in results[0]["weights"].items())


@pytest.mark.parametrize("variant", [name for name in FSDP if name not in ("1 rank", "2 ranks")])
def test_steps_equal_those_of_megatron_however_they_are_computed(variant, checkpoint, rollouts, megatron):
    world_size, overrides = FSDP[variant]
    args = fsdp_args(checkpoint, **LOSS, **BATCHES["per token"], **overrides)
    assert_same(run_ranks(train, world_size, args, rollouts)[0], megatron("per token"))


@pytest.mark.parametrize("batches", WHOLE_SEQUENCES)
def test_losses_of_whole_sequences_in_parts(batches, checkpoint, rollouts, megatron):
    args = fsdp_args(checkpoint, **{**LOSS, **WHOLE_SEQUENCES[batches], **CP2})
    results = run_ranks(train, 2, args, rollouts)
    assert_same(results[0], megatron(batches))


@pytest.mark.parametrize("versions", VERSIONS)
def test_other_weights_take_their_turns(versions, checkpoint, rollouts, tmp_path):
    flags = {**LOSS, "use_kl_loss": False, "kl_loss_coef": 0.0, "global_batch_size": 4, **VERSIONS[versions]}
    if versions == "teacher":
        flags["opd_teacher_load"] = save_tiny_hf(tmp_path, "qwen3", seed=9)
    rollouts = [*rollouts, random_rollout(256, seed=2)]
    (wanted,) = run_ranks(_with_updates, 1, trainer_args(checkpoint, **flags), rollouts)
    found = run_ranks(_with_updates, 2, fsdp_args(checkpoint, **flags), rollouts)[0]
    assert_same(found, wanted, rounding=2e-6)  # the mean of differences of either sign


def _with_updates(rank, args, rollouts):
    """Trains on the rollouts, sending the weights after each but the first."""
    worker = TrainWorker(args)
    worker.start()
    reports = []
    for rollout_id, rollout in enumerate(rollouts):
        report = worker.train_shard(rollout_id, split(args, rollout, worker.parallel_config()))[0]
        reports.append([report["train"], report["rollout"]] if report else [])
        if args.keep_old_actor and rollout_id:
            worker.backend.versions.copy(src_tag="actor", dst_tag="rollout_actor")
    return {"reports": reports, "weights": weights_of(worker)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_optimizers(optimizer, checkpoint, rollouts, megatron):
    args = fsdp_args(checkpoint, **LOSS, **OPTIMIZERS[optimizer])
    assert_same(run_ranks(train, 2, args, rollouts)[0], megatron(optimizer))


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "qwen3_moe"])
def test_other_families_untied_embeddings_and_experts(model_type, tmp_path, rollouts):
    path = save_tiny_hf(tmp_path, model_type)
    experts = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    flags = LOSS | {"adam_eps": 1e-6}  # with 1e-8 weights move by rounding errors of gradients near 0
    (wanted,) = run_ranks(train, 1, trainer_args(path, **flags, **experts), rollouts[:1])
    # A parameter group of megatron-core's for experts, at the same rate.
    assert wanted["reports"][0][0][0].pop("train/lr-pg_2", 1e-3) == 1e-3
    assert_same(run_ranks(train, 2, fsdp_args(path, **flags), rollouts[:1])[0], wanted)


def test_no_bias_decays_not_even_a_stacked_one_of_experts(tmp_path, rollouts):
    tiny_family("gpt_oss", tmp_path)
    flags = {**LOSS, "weight_decay": 5.0, "adam_eps": 1e-5}
    experts = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    (wanted,) = run_ranks(train, 1, trainer_args(tmp_path, **flags, **experts), rollouts[:1])
    assert wanted["reports"][0][0][0].pop("train/lr-pg_2", 1e-3) == 1e-3
    wanted["reports"][0][0][0].pop("train/lr-pg_3", None)
    assert_same(run_ranks(train, 1, fsdp_args(tmp_path, **flags), rollouts[:1])[0], wanted)


def test_sparse_attention_in_padded_rows(tmp_path, rollouts):
    """Of transformers, whose packed rows would mix sequences: the trainer notices."""
    path, frozen = str(tmp_path), {"freeze_indexer": True}
    tiny_family("glm_moe_dsa", tmp_path)
    flags = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0], **frozen}
    flags["moe_router_bias_update_rate"] = 0.0
    (wanted,) = run_ranks(train, 1, trainer_args(path, **LOSS, **flags), rollouts[:1])
    assert wanted["reports"][0][0][0].pop("train/lr-pg_2", 1e-3) == 1e-3
    fixed = {"moe_router_bias_update_rate": 0.0}
    assert_same(run_ranks(train, 2, fsdp_args(path, **LOSS, **frozen, **fixed), rollouts[:1])[0], wanted)


def test_nothing_of_it_loads_megatron_core(checkpoint, tmp_path):
    made = tmp_path / "args.pkl"  # the parser knows megatron-core's options
    made.write_bytes(pickle.dumps(fsdp_args(checkpoint, save=str(tmp_path), save_hf=f"{tmp_path}/hf")))
    assert run_ranks(_modules_of_a_run, 1, str(made)) == [[]]


def _modules_of_a_run(rank, made):
    """Returns what a run loads of megatron-core and of its trainer, with all of our code imported anew."""
    ours = {"megatron", "slime", "slime_plugins", "tests"}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    from slime.ray.train_worker import TrainWorker
    from tests.trainer_batches import random_rollout, split

    args = pickle.loads(Path(made).read_bytes())  # noqa: S301 - our own, whose classes are the new ones
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, random_rollout(256), worker.parallel_config()))
    worker.save_model(0)
    return [name for name in sys.modules if name.split(".")[0] == "megatron" or "megatron_utils" in name]


def test_bfloat16_computes_in_it_and_keeps_float32_weights(checkpoint, rollouts):
    half = {"params_dtype": torch.bfloat16, "bf16": True}
    (wanted,) = run_ranks(train, 1, trainer_args(checkpoint, **half), rollouts[:1])
    (found,) = run_ranks(train, 1, fsdp_args(checkpoint, **half), rollouts[:1])
    assert {weight.dtype for weight in found["weights"].values()} == {torch.bfloat16}
    step, wanted_step = found["reports"][0][0][0], wanted["reports"][0][0][0]
    assert step["train/loss"] == pytest.approx(wanted_step["train/loss"], rel=0.05, abs=0.05)
    assert step["train/grad_norm"] == pytest.approx(wanted_step["train/grad_norm"], rel=0.1)
