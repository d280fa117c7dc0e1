"""Routing replay: optimizer steps with given routes are those of plain transformers with the same ones."""

from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
import transformers

from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.build import build_executor
from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.megatron_utils.data import get_batch
from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from slime.training.micro_batches import DataIterator, tensorize
from slime.training.passes import log_probs
from slime.training.routes import packed_routes
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LAYOUTS = {
    "1 process": (1, {}),
    "TP 2, EP 2, experts recomputed": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
        | {"expert_tensor_parallel_size": 1}
        | SELECTED,
    ),
    "PP 2, recomputed": (2, PP2 | RECOMPUTED),
    "PP 2 + VPP 2, experts recomputed": (2, PP2 | SELECTED | {"virtual_pipeline_model_parallel_size": 2}),
    "CP 2, recomputed": (2, CP2 | RECOMPUTED),
    "CP 2, contiguous": (2, CP2 | {"allgather_cp": True}),
}
ROUTER = {
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.3],
    "moe_z_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
LR = 0.002
R2 = {"use_routing_replay": True, "records_routes": True}
R3 = {"use_routing_replay": True, "use_rollout_routing_replay": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3_moe")


@pytest.fixture(scope="module")
def rollout():
    return random_rollout(vocab_size=256, num_samples=12)


def random_routes(rollout, layers=4, experts=4, topk=2):
    """Any experts for each token but the last one of a sample."""
    generator = np.random.default_rng(0)
    return [
        generator.permuted(np.tile(np.arange(experts), (len(tokens) - 1, layers, 1)), axis=-1)[..., :topk]
        .astype(np.int16)
        .copy()
        for tokens in rollout["tokens"]
    ]


class Reference:
    """A model of ``transformers`` whose routers are told, sample by sample, which experts to choose."""

    def __init__(self, checkpoint):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.given = None
        self.layers = []
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(
                    lambda _, __, out, number=number: self._choose(number, out)
                )
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-8)

    def _choose(self, number, out):
        logits, _, chosen = out
        if self.given is not None:
            given = torch.from_numpy(self.given[:, number].astype(np.int64))
            chosen = torch.cat([given, chosen[len(given) :]])
        shares = logits.float().softmax(-1)
        self.layers.append((number, shares, chosen))
        weights = shares.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    def log_probs(self, tokens, response, routes=None):
        self.given = routes
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -response - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-response:])[:, None])[:, 0]

    @torch.no_grad()
    def routes(self, tokens):
        """The model's own, of all tokens, [L, layers, top-k]."""
        self.layers = []
        self.log_probs(tokens, 1)
        found = np.zeros((len(tokens), 4, 2), dtype=np.int16)
        for number, _, chosen in self.layers:
            found[:, number] = chosen
        return found

    def step(self, batch, micro_batches, routes, old):
        """One step of GRPO; ``old`` log-probs of each sample. Returns what the trainer reports of it."""
        policy, balance = 0.0, 0.0
        samples = [i for members in micro_batches for i in members]
        for members in micro_batches:
            self.layers = []
            for i in members:
                new = self.log_probs(batch["tokens"][i], batch["response_lengths"][i], routes[i])
                ratio, advantage = (new - old[i]).exp(), batch["rewards"][i]
                loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
                mask = torch.tensor(batch["loss_masks"][i]).float()
                policy = policy + (loss * mask).sum() / mask.sum() / len(samples)
            balance = balance + self._balance() / len(micro_batches)
        (policy + 0.3 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {"loss": policy.detach(), "grad_norm": norm, "moe_load_balancing_loss": balance.detach() / 3}
        return {f"train/{name}": float(value) for name, value in found.items()}

    def _balance(self):
        """Switch Transformer's eq. 4 of the experts that tokens are sent to, summed over layers."""
        total = 0.0
        for layer in {number for number, _, _ in self.layers}:
            shares = torch.cat([found for number, found, _ in self.layers if number == layer])
            chosen = torch.cat([found for number, _, found in self.layers if number == layer])
            sent = torch.zeros_like(shares).scatter(1, chosen, 1.0)
            total = total + 4 * (sent.mean(0) / 2 * shares.mean(0)).sum()
        return total


def _train(rank, args, rollout, repeats=1):
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, rollout, worker.parallel_config())
    reports = [worker.train_shard(i, dict(shard))[0] for i in range(repeats)]
    weights = {}
    for bucket in HfWeights(args, worker.backend.state.model).buckets(1 << 30):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    micro_batches = [[shard["partition"][i] for i in members] for members in shard["micro_batch_indices"]]
    ends = [0, *accumulate(shard["num_microbatches"])]
    steps = [micro_batches[start:end] for start, end in pairwise(ends)]
    return {"reports": reports, "weights": weights, "steps": steps}


def expect(results, reference, wanted):
    """The reports of all steps, and the routers' weights after them."""
    (reports,) = [result["reports"] for result in results if result["reports"][0]]
    found = [step for report in reports for step in report["train"]]
    for step, values in zip(found, wanted, strict=True):
        for name, value in values.items():
            assert step[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    after = reference.model.state_dict()
    for result in results:
        routers = {name: weight for name, weight in result["weights"].items() if "mlp.gate.w" in name}
        assert len(routers) == 3
        for name, weight in routers.items():
            torch.testing.assert_close(weight, after[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_routes_of_the_engine_agrees_with_transformers(layout, checkpoint, rollout):
    """Routes that no router would choose, in log-probs and both ways of training; routers learn from them."""
    world_size, overrides = LAYOUTS[layout]
    routes = random_routes(rollout)
    args = trainer_args(
        checkpoint, max_tokens_per_gpu=32, global_batch_size=12, ci_test=True, **R3, **ROUTER, **overrides
    )
    args.ci_train_rollout_logprob_abs_diff_threshold = 10.0
    results = run_ranks(_train, world_size, args, rollout | {"rollout_routed_experts": routes})
    reference = Reference(checkpoint)
    with torch.no_grad():
        pairs = zip(rollout["tokens"], rollout["response_lengths"], routes, strict=True)
        old = [reference.log_probs(*pair) for pair in pairs]
    (micro_batches,) = results[0]["steps"]
    assert len(micro_batches) > 2
    wanted = reference.step(rollout, micro_batches, routes, old)
    gap = [
        (torch.tensor(theirs) - ours).abs()[torch.tensor(mask) > 0].mean()
        for theirs, ours, mask in zip(rollout["rollout_log_probs"], old, rollout["loss_masks"], strict=True)
    ]
    wanted["train/train_rollout_logprob_abs_diff"] = float(sum(gap) / len(gap))
    expect(results, reference, [wanted])


@pytest.mark.parametrize("layout", ["1 process", "PP 2, recomputed"])
def test_later_steps_keep_the_routes_that_were_recorded(layout, checkpoint, rollout):
    """Three steps that move routers far; nothing of a rollout is left to the next one."""
    world_size, overrides = LAYOUTS[layout]
    flags = dict(max_tokens_per_gpu=64, global_batch_size=4, lr=LR)
    args = trainer_args(checkpoint, **flags, **R2, **ROUTER, **overrides)
    results = run_ranks(_train, world_size, args, rollout, 2)
    reference = Reference(checkpoint)
    for group in reference.optimizer.param_groups:
        group["lr"] = LR
    wanted, moved = [], 0
    for _ in range(2):
        routes = [reference.routes(tokens) for tokens in rollout["tokens"]]
        with torch.no_grad():
            pairs = zip(rollout["tokens"], rollout["response_lengths"], routes, strict=True)
            old = [reference.log_probs(*pair) for pair in pairs]
        for micro_batches in results[0]["steps"]:
            wanted.append(reference.step(rollout, micro_batches, routes, old))
        now = [reference.routes(tokens) for tokens in rollout["tokens"]]
        moved += sum((a != b).any(-1).sum() for a, b in zip(routes, now, strict=True))
    assert len(wanted) == 6 and moved > 100
    expect(results, reference, wanted)


def _losses(rank, args, rollout, *routes):
    worker = TrainWorker(args)
    worker.start()
    reports = []
    for number, given in enumerate(routes):
        batch = rollout | {"rollout_routed_experts": given}
        reports.append(worker.train_shard(number, split(args, batch, worker.parallel_config()))[0])
    return [report["train"][0] for report in reports]


def test_one_route_changed_by_hand_changes_the_loss(checkpoint, rollout):
    """Unlike the same routes once more. The learning rate is 0; ratios are in bounds, where they count."""
    reference = Reference(checkpoint)
    routes = [reference.routes(tokens)[:-1] for tokens in rollout["tokens"]]
    with torch.no_grad():
        pairs = zip(rollout["tokens"], rollout["response_lengths"], strict=True)
        old = [reference.log_probs(*pair).tolist() for pair in pairs]
    changed = [of_sample.copy() for of_sample in routes]
    of_token = changed[3][-1, 3]  # which predicts the last token
    of_token[:] = [expert for expert in range(4) if expert not in of_token]
    flags = dict(use_rollout_logprobs=True, global_batch_size=12, max_tokens_per_gpu=512, lr=0.0)
    args = trainer_args(checkpoint, **flags, weight_decay=0.0, **ROUTER, **R3)
    rollout = rollout | {"rollout_log_probs": old}
    ((first, again, other),) = run_ranks(_losses, 1, args, rollout, routes, routes, changed)
    assert again["train/loss"] == pytest.approx(first["train/loss"], abs=1e-7)
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert abs(other["train/loss"] - first["train/loss"]) > 1e-5
    assert other["train/grad_norm"] != pytest.approx(first["train/grad_norm"], rel=1e-4)


@torch.inference_mode()
def engine_routes(path, rollout):
    """Returns the experts of all tokens but the last one of each sample, by the embedded engine."""
    limits = Limits(rows=4, tokens=512, chunk=64, context=128)
    executor, weights = build_executor(path, ModelConfig.from_directory(path), limits, True)
    load_checkpoint(weights, path)
    routes = []
    for tokens in rollout["tokens"]:
        executor.prefill([tokens[:-1]], 0)
        routes.append(executor.routes[0].numpy().copy())
    return routes


def _compare(rank, args, rollout, routes):
    """How many routes of this rank's tokens and layers are the engine's, and how many are not."""
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, rollout | {"rollout_routed_experts": routes}, worker.parallel_config())
    batch = tensorize(shard, worker.backend.device)
    data = DataIterator(batch, batch["micro_batch_indices"])
    worker.backend.forward(batch, data, partial(log_probs, run_config(args)), "")
    recorded = worker.backend.state.replay._recorded
    equal = other = 0
    data.reset()
    for number in range(len(batch["micro_batch_indices"])):
        context = worker.backend.context
        packed = get_batch(data, ("rollout_routed_experts",), context.pad_multiple, context)
        rows = packed_routes(packed["rollout_routed_experts"], packed["inputs"].split)
        for layer in {layer for layer, at in recorded if at == number}:
            theirs, ours = rows[:, layer], recorded[layer, number]
            known = theirs[:, 0] >= 0
            same = (theirs.sort(-1).values == ours.sort(-1).values).all(-1)
            equal += int((same & known).sum())
            other += int((~same & known).sum())
    return {"equal": equal, "other": other}


@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP 2", "CP 2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_trainer_chooses_the_experts_of_the_engine(family, layout, tmp_path, rollout):
    if family == "qwen3_moe":
        save_tiny_hf(tmp_path, family)
    else:
        tiny_family(family, tmp_path)
    routes = engine_routes(tmp_path, rollout)
    flags = dict(max_tokens_per_gpu=64, global_batch_size=12, moe_router_bias_update_rate=0.0)
    args = trainer_args(tmp_path, **flags, **ROUTER, **R2, **layout)
    results = run_ranks(_compare, 2, args, rollout, routes)
    tokens = sum(len(tokens) - 1 for tokens in rollout["tokens"])
    assert sum(result["other"] for result in results) == 0
    assert sum(result["equal"] for result in results) == 3 * tokens  # one of four layers is dense
