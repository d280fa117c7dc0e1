"""Weights beside the trained ones: a teacher's, and those that the engines had."""

from functools import partial

import pytest
import torch
import transformers

from slime.ray.train_worker import TrainWorker
from slime.training.micro_batches import DataIterator, tensorize
from slime.training.passes import log_probs
from slime.training.versions import TRAINED
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

SEEN = []


def look(args, rollout_id, rollout_data):
    SEEN.append({k: v for k, v in rollout_data.items() if k in ("log_probs", "teacher_log_probs", "tokens")})


HOOK = f"{__name__}.look"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


class _Engines:
    def run(self, version):
        return 0


def _own_log_probs(worker, shard, tag):
    batch = tensorize(shard, worker.backend.device)
    data = DataIterator(batch, batch["micro_batch_indices"])
    with worker.backend.versions.entered(tag):
        found = worker.backend.forward(batch, data, partial(log_probs, worker._config), "")["log_probs"]
    return torch.cat(found)


def _distances(rank, args, updates):
    """How far each rollout's old log-probs are from those by what each update sent."""
    worker = TrainWorker(args)
    worker.start()
    worker._update, sent, distances = _Engines(), [], []

    def update():
        worker.update_weights()
        sent.append(f"sent {len(sent)}")
        worker.backend.versions.backup(sent[-1])

    update()
    for rollout_id in range(4):
        shard = split(args, random_rollout(256, seed=rollout_id), worker.parallel_config())
        worker.train_shard(rollout_id, shard)
        old = torch.cat(SEEN[-1]["log_probs"])
        worker.backend.versions.backup(TRAINED)
        found = [float((old - _own_log_probs(worker, shard, tag)).abs().max()) for tag in sent]
        distances.append([tag for tag, distance in zip(sent, found, strict=True) if distance < 1e-6])
        if rollout_id in updates:
            update()
    return distances


@pytest.mark.parametrize(
    ("interval", "updates", "exact"),
    [
        # One rollout ahead: the engines make a rollout before they get what the last one has trained.
        (1, (0, 1, 2), [["sent 0"], ["sent 0"], ["sent 1"], ["sent 2"]]),
        (2, (1, 3), [["sent 0"], ["sent 0"], ["sent 0"], ["sent 1"]]),
    ],
)
def test_old_log_probs_are_those_of_the_weights_that_the_engines_had(checkpoint, interval, updates, exact):
    args = trainer_args(checkpoint, keep_old_actor=True, rollout_data_postprocess_path=HOOK, lr=1e-2)
    args.update_weights_interval = interval
    (found,) = run_ranks(_distances, 1, args, updates)
    assert found == exact


def _with_teacher(rank, args):
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, random_rollout(256), worker.parallel_config())
    report, _ = worker.train_shard(0, shard)
    before = SEEN[-1]
    worker.train_shard(1, shard)
    metric = {name: report["rollout"][f"rollout/{name}"] for name in ("opd_reverse_kl", "teacher_log_probs")}
    return {"first": before, "second": SEEN[-1], "metric": metric}


def test_a_teacher_in_the_trainer_judges_the_tokens_and_does_not_learn(checkpoint, tmp_path):
    teacher = save_tiny_hf(tmp_path / "teacher", "qwen3", seed=5)
    args = trainer_args(checkpoint, use_opd=True, opd_type="megatron", opd_teacher_load=teacher)
    args.rollout_data_postprocess_path, args.opd_teacher_ckpt_step = HOOK, None
    (found,) = run_ranks(_with_teacher, 1, args)
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for step in ("first", "second"):
        seen = found[step]
        for tokens, judged in zip(seen["tokens"], seen["teacher_log_probs"], strict=True):
            with torch.no_grad():
                rows = model(tokens[None]).logits[0].log_softmax(-1)[:-1]
            wanted = rows.gather(1, tokens[1:, None])[:, 0][-len(judged) :]
            torch.testing.assert_close(judged, wanted, rtol=1e-4, atol=1e-4)
    own = torch.cat(found["first"]["log_probs"]) - torch.cat(found["second"]["log_probs"])
    assert own.abs().max() > 1e-4  # the student does
    assert found["metric"]["opd_reverse_kl"] != 0 > found["metric"]["teacher_log_probs"]
