"""Adapters beside the base: engines compute what the trainer does at each sync, and little is sent for it."""

import pytest
import torch

from slime.backends.sglang_utils.client import EngineClient
from slime.config.lora import SERVED_ADAPTER
from slime.ray.served_policy import log_probs_of
from slime.ray.train_worker import TrainWorker
from slime.utils.types import EngineEndpoint
from tests.backends.fsdp_harness import fsdp_args
from tests.engines.embedded import Server
from tests.megatron_harness import run_ranks, save_tiny_hf, tiny_hf_model
from tests.trainer_batches import split, trainer_args
from tests.transformers_step import noisy_rollout

pytestmark = pytest.mark.slow

RANK = 4
IDS = [5, 3, 7, 11, 2, 9, 17, 21]
LAYOUTS = {
    "colocated": (1, {"colocate": True}),
    "apart, TP 2 + SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "apart, PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "apart, FSDP over 2": (2, {"train_backend": "fsdp"}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Makes those of the engines at first, and of the trainer."""
    root = tmp_path_factory.mktemp("hf")
    return [save_tiny_hf(root / str(seed), "qwen3", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def urls(checkpoints):
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--enable-lora", "--max-lora-rank", str(RANK))
    servers = [Server(checkpoints[0], *flags) for _ in range(2)]
    try:
        yield [server.wait_ready().url for server in servers]
    finally:
        for server in servers:
            server.stop()


def _syncs(rank, args, rollout, schedule):
    """What each update sent, and what trainer and engines say after it; between two of them is a step."""
    worker = TrainWorker(args)
    worker.start()
    told, endpoints = [], []
    for number, connected in enumerate(schedule):
        if number:
            worker.train_shard(0, split(args, rollout, worker.parallel_config()))
        if connected != endpoints:
            worker.connect_rollout_engines(connected)
            endpoints = connected
        report = worker.update_weights()[1]
        expected = worker.text_log_probs(IDS)
        clients = [EngineClient(endpoint) for endpoint in endpoints]
        found = [[log_probs_of(client, IDS, name) for name in (SERVED_ADAPTER, None)] for client in clients]
        told.append(
            (report.sent, report.density, expected, found, [client.weight_version() for client in clients])
        )
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_compute_with_the_trainers_adapter_after_each_sync(layout, checkpoints, urls):
    world_size, flags = LAYOUTS[layout]
    first, second = (EngineEndpoint(url, None, 1, 0 if "colocate" in flags else None) for url in urls)
    for url in urls:  # no base is there before
        EngineClient(EngineEndpoint(url, None, 1, None)).update_weights_from_disk(checkpoints[0])
    # An engine that takes another's place is given the base, and the adapter.
    schedule = [[first], [first], [first], [second], [second]]
    lora = {"lora_rank": RANK, "lora_alpha": 8.0, "lora_merge": False, "lr": 0.02}
    make = fsdp_args if "train_backend" in flags else trainer_args
    args = make(checkpoints[1], **lora, check_weight_checksums=True, update_weight_buffer_size=60_000)
    vars(args).update(flags, synced_checkpoint=str(checkpoints[0]), update_weight_transport="nccl")
    results = run_ranks(_syncs, world_size, args, noisy_rollout(checkpoints[1]), schedule)
    model = tiny_hf_model("qwen3", seed=1)
    whole = sum(param.numel() * 4 for param in model.parameters())
    (adapter,) = {sent for sent, *_ in results[0][1:3]}
    assert 0 < adapter < whole / 5
    assert [sent - adapter for sent, *_ in results[0]] == [whole, 0, 0, whole, 0]
    with torch.no_grad():
        base = model(torch.tensor([IDS])).logits[0].log_softmax(-1)[:-1]
    base = base.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    gaps = []
    for number, (_, density, _, found, versions) in enumerate(results[0]):
        assert density == pytest.approx(adapter / whole) and versions == [str(number + 1)]
        expected = next(told[number][2] for told in results if told[number][2] is not None)
        for adapted, alone in found:
            assert adapted == pytest.approx(expected, abs=1e-5) and alone == pytest.approx(base, abs=1e-5)
            gaps.append(max(abs(a - b) for a, b in zip(adapted, alone, strict=True)))
    assert gaps[0] < 1e-5 and all(gap > 0.01 for gap in gaps[1:])


def _syncs_of_several(rank, args, rollouts, endpoint):
    """What trainer and engine say with each adapter after each update; before the later ones is a step."""
    worker = TrainWorker(args)
    worker.start()
    worker.connect_rollout_engines([endpoint])
    client, told = EngineClient(endpoint), []
    for number in range(len(rollouts) + 1):
        if number:
            worker.train_shard(number, split(args, rollouts[number - 1], worker.parallel_config()))
            worker.offload_training_state()  # as on the engines' GPUs
        report = worker.update_weights()[1]
        names = args.lora_adapters
        expected = {name: worker.text_log_probs(IDS, name) for name in names}
        found = {name: log_probs_of(client, IDS, name) for name in [*names, None]} if not rank else {}
        told.append((expected, found, client.weight_version(), report.density))
        if number:
            worker.sleep()
            worker.wake_up()
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_compute_with_each_of_several_adapters(layout, checkpoints, urls):
    world_size, flags = LAYOUTS[layout]
    endpoint = EngineEndpoint(urls[0], None, 1, 0 if "colocate" in flags else None)
    EngineClient(endpoint).update_weights_from_disk(checkpoints[0])
    names = ["first", "second"]
    lora = {"lora_rank": RANK, "lora_alpha": 8.0, "lora_merge": False, "lr": 0.02, "lora_adapters": names}
    make = fsdp_args if "train_backend" in flags else trainer_args
    args = make(checkpoints[1], **lora, check_weight_checksums=True, update_weight_buffer_size=60_000)
    vars(args).update(flags, synced_checkpoint=str(checkpoints[0]), update_weight_transport="nccl")
    rollout = noisy_rollout(checkpoints[1])
    of = (["first"] * 4 + ["second"] * 4, ["second"] * 8)
    rollouts = [dict(rollout, adapter=adapters) for adapters in of]
    results = run_ranks(_syncs_of_several, world_size, args, rollouts, endpoint)
    for number, (_, found, version, density) in enumerate(results[0]):
        assert version == str(number + 1) and density == results[0][0][3] > 0
        for name in names:
            wanted = next(told[number][0][name] for told in results if told[number][0][name] is not None)
            assert found[name] == pytest.approx(wanted, abs=1e-5)
        assert found[None] == pytest.approx(results[0][0][1][None], abs=1e-6)
    (_, start, *_), (_, after, *_), (_, last, *_) = results[0]
    apart = lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=True))
    assert apart(start["first"], start["second"]) < 1e-6
    assert apart(after["first"], after["second"]) > 0.01 and apart(after["first"], start[None]) > 0.01
    assert apart(last["first"], after["first"]) < 1e-6 and apart(last["second"], after["second"]) > 0.01


def test_an_engine_that_takes_no_adapters_ends_the_update_by_name(checkpoints):
    server = Server(checkpoints[0], "--skip-tokenizer-init", "--dtype", "float32")
    args = trainer_args(checkpoints[1], lora_rank=RANK, lora_merge=False)
    vars(args).update(synced_checkpoint=str(checkpoints[0]), update_weight_transport="nccl")
    try:
        where = EngineEndpoint(server.wait_ready().url, None, 1, None)
        with pytest.raises(Exception, match="runs without --enable-lora"):
            run_ranks(_syncs, 1, args, noisy_rollout(checkpoints[1]), [[where]])
    finally:
        server.stop()
