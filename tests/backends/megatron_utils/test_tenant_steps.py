"""Tenants that train at once, in any order, each as PEFT with torch's Adam would train it alone."""

import pytest
import torch
from peft import get_peft_model_state_dict

from slime.ray.train_worker import TrainWorker
from slime.training.weights import ADAPTER
from tests.backends.lora_reference import ALPHA, RANK, expect_close, save_random, tensors_of
from tests.backends.tenant_reference import ADAMS, CLIPS, NAMES, ROUNDS, data_of, loss_of, trained_alone
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow

LAYOUTS = {
    "1 process": (1, {}),
    "TP 2 + SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "DP 2": (2, {"overlap_grad_reduce": True, "bucket_size": 4000}),
    "CP 2": (2, {"context_parallel_size": 2}),
}


def _args(checkpoint, adapter, **overrides):
    flags = dict(lora_rank=RANK, lora_alpha=ALPHA, lora_merge=False, lora_adapters=NAMES)
    flags |= dict(lora_adapter_path=adapter, no_check_for_nan_in_loss_and_grad=True)
    return trainer_args(checkpoint, **flags, **overrides)


def _started(args):
    worker = TrainWorker(args)
    worker.start()
    worker.serve_tenants()
    return worker


def _weights(worker):
    return {name: tensors_of(worker.backend.weights(ADAPTER, name)) for name in NAMES}


def _at_once(rank, args):
    """Gradients of both before a step of either, in two parts; the weights, and all that passes told."""
    worker, told = _started(args), []
    for number in range(ROUNDS):
        for part in (slice(0, 2), slice(2, None)):
            for name in NAMES:
                if data := data_of(name, number)[part]:
                    asked = "forward_backward", name, data, loss_of(name, number), CLIPS
                    told.append(worker.tenant(*asked))
        for name in reversed(NAMES):
            assert worker.tenant("optim_step", name, ADAMS[name])
    return _weights(worker), told


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    return save_random(checkpoint, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def alone(checkpoint, adapter):
    return {name: trained_alone(checkpoint, adapter, name) for name in NAMES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_of_two_trains_as_it_would_alone(layout, checkpoint, adapter, alone):
    world_size, overrides = LAYOUTS[layout]
    results = run_ranks(_at_once, world_size, _args(checkpoint, adapter, **overrides))
    for weights, _ in results:
        for name in NAMES:
            expect_close(weights[name], get_peft_model_state_dict(alone[name][0]))
    passes = [(name, number, part) for number in range(ROUNDS) for part in range(2) for name in NAMES]
    passes = [(name, number) for name, number, part in passes if data_of(name, number)[2 * part :]]
    found = {name: [] for name in NAMES}
    for turn, (name, _) in enumerate(passes):
        of_pass = {number: of for _, told in results for number, of in told[turn].items()}
        found[name] += [of_pass[number] for number in sorted(of_pass)]
    for name in NAMES:
        for (loss, log_probs), (wanted_loss, wanted) in zip(found[name], alone[name][1], strict=True):
            assert loss == pytest.approx(wanted_loss, abs=1e-4)
            assert log_probs == pytest.approx(wanted, abs=1e-5)


def _through_a_state(rank, args, directory):
    """Goes back to a state of another tenant's, gradients forgotten, and does what was done behind it."""
    worker = _started(args)

    def step(name, number):
        worker.tenant("forward_backward", name, data_of("alice", number), "cross_entropy", {})
        worker.tenant("optim_step", name, ADAMS["alice"])

    step("alice", 0)
    worker.tenant("save_state", "alice", directory)
    step("alice", 1)
    step("bob", 2)
    worker.tenant("forward_backward", "bob", data_of("bob", 0), "cross_entropy", {})
    worker.tenant("load_state", "bob", directory)
    step("bob", 1)
    return _weights(worker)


@pytest.mark.parametrize("layout", ["1 process", "DP 2"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_a_saved_state_is_gone_on_from_bit_for_bit(layout, half, checkpoint, adapter, tmp_path):
    world_size, overrides = LAYOUTS[layout]
    overrides = overrides | (dict(params_dtype=torch.bfloat16, bf16=True) if half else {})
    args = _args(checkpoint, adapter, **overrides)
    for weights in run_ranks(_through_a_state, world_size, args, str(tmp_path)):
        for name, tensor in weights["alice"].items():
            assert torch.equal(weights["bob"][name], tensor), name


def _another_s_state(rank, args, path):
    worker = _started(args)
    worker.tenant("save_state", "alice", path)
    state = torch.load(f"{path}/rank_0.pt", weights_only=True)
    state["weights"][0] = state["weights"][0][:1]  # which `copy_` would repeat
    torch.save(state, f"{path}/rank_0.pt")
    worker.tenant("load_state", "bob", path)


def test_a_state_of_other_shapes_is_refused(checkpoint, adapter, tmp_path):
    with pytest.raises(RuntimeError, match=r"ValueError: state: weights of shapes \[\[1, "):
        run_ranks(_another_s_state, 1, _args(checkpoint, adapter), str(tmp_path))


def _broken_gradients(rank, args):
    worker = _started(args)
    before = _weights(worker)["alice"]
    broken = data_of("alice", 0)
    broken[0]["log_probs"] = [-1e3] * len(broken[0]["log_probs"])  # exp overflows
    worker.tenant("forward_backward", "alice", broken, "importance_sampling", {})
    worker.tenant("forward_backward", "bob", data_of("bob", 0), "cross_entropy", {})
    taken = [worker.tenant("optim_step", name, ADAMS[name]) for name in NAMES]
    after = _weights(worker)
    unmoved = [all(torch.equal(after[name][key], before[key]) for key in before) for name in NAMES]
    return taken, unmoved


def test_gradients_that_are_not_finite_are_one_tenant_s_own(checkpoint, adapter):
    world_size, overrides = LAYOUTS["DP 2"]
    for found in run_ranks(_broken_gradients, world_size, _args(checkpoint, adapter, **overrides)):
        assert found == ([False, True], [True, False])


def _sent(rank, args):
    """What engines would get: of a tenant that trains on, what it had when that was asked."""
    worker = _started(args)
    sent = worker._tenants.sent("alice")
    seen = [tensors_of(sent)]
    for publishes in (False, True):
        worker.tenant("forward_backward", "alice", data_of("alice", 0), "cross_entropy", {})
        worker.tenant("optim_step", "alice", ADAMS["alice"])
        if publishes:
            worker.tenant("publish", "alice")
        seen.append(tensors_of(sent))
    return seen, _weights(worker)["alice"]


def test_engines_get_what_a_tenant_has_published(checkpoint, adapter):
    ((first, unpublished, published), live) = run_ranks(_sent, 1, _args(checkpoint, adapter))[0]
    for name, tensor in live.items():
        assert torch.equal(unpublished[name], first[name]) and torch.equal(published[name], tensor)
    assert any(not torch.equal(first[name], tensor) for name, tensor in live.items())
