"""The embedded engine on a GPU: its numbers, its memory, weights that reach it, and whole runs."""

import threading

import pytest
import torch
import torch.distributed as dist

from slime.utils.accelerator import empty_cache
from slime.utils.distributed_utils import init_process_group
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors
from tests.backends.embedded_engine.test_device import answers, state
from tests.e2e.conftest import data, model, rl_flags, start_alone  # noqa: F401  fixtures
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint, make_model, token_logprobs
from tests.families import tiny_family

pytestmark = pytest.mark.gpu

PROMPT = [5, 6, 7, 8]
FAMILIES = ("qwen3", "qwen3_moe", "glm4", "qwen2_moe", "qwen3_next", "deepseek_v32")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    make_checkpoint(path)
    server = Server(path, "--device", "cuda", "--enable-memory-saver")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def gap(server: Server, trained) -> float:
    """The largest difference from the trained's log-probs, float32 on the CPU."""
    answer = server.generate(PROMPT, {"max_new_tokens": 8, "ignore_eos": True}, return_logprob=True)
    expected = token_logprobs(trained, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu_but_for_rounding(tmp_path, family):
    if family in ("qwen3", "qwen3_moe"):
        make_checkpoint(tmp_path, family)
    else:
        tiny_family(family, tmp_path)
    with torch.inference_mode():
        expected = answers(state(tmp_path, device="cpu"))
        found = answers(state(tmp_path, device="cuda"))
    assert [s.output_ids for s in found] == [s.output_ids for s in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.output_logprobs.of_tokens == pytest.approx(other.output_logprobs.of_tokens, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_by_itself_is_answered_alike_each_time(tmp_path, dtype):
    make_checkpoint(tmp_path)
    server = state(tmp_path, device="cuda", dtype=dtype, enable_deterministic_inference=True)
    with torch.inference_mode():
        first, second = answers(server), answers(server)
    assert [s.output_ids for s in first] == [s.output_ids for s in second]
    assert [s.output_logprobs for s in first] == [s.output_logprobs for s in second]


def test_released_memory_is_the_devices_again(tmp_path):
    make_checkpoint(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    empty_cache()
    nothing = torch.cuda.memory_reserved()
    server = state(tmp_path, device="cuda", enable_memory_saver=True, enable_weights_cpu_backup=True)
    with torch.inference_mode():
        expected = [s.output_ids for s in answers(server)]
        held = torch.cuda.memory_reserved() - nothing
        server.memory.release(None)
        left = torch.cuda.memory_reserved() - nothing
        assert held > server.parameters.num_bytes and left < 0.1 * held
        server.memory.resume(None)
        assert [s.output_ids for s in answers(server)] == expected


@pytest.mark.parametrize("flat", [False, True])
def test_weights_arrive_as_handles_of_gpu_memory(server, flat):
    trained = make_model("qwen3", seed=40 + flat)
    named = [(name, tensor.cuda()) for name, tensor in trained.state_dict().items()]
    payload: object = named
    if flat:
        bucket = FlattenedTensorBucket(named_tensors=named)
        payload = {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}
    assert server.post("/begin_weight_update").status_code == 200
    answer = server.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[serialize_tensors(payload)],
        load_format="flattened_bucket" if flat else None,
    )
    assert server.post("/end_weight_update").status_code == 200
    assert answer.status_code == 200, answer.text
    assert gap(server, trained) < 1e-3
    del named, payload, answer
    torch.cuda.ipc_collect()


def _broadcast(server: Server, backend: str, device: str, trained) -> None:
    """Rank 0 of a group with the server, and one update through it."""
    tensors = [(n, t.to(device)) for n, t in trained.state_dict().items() if n != "lm_head.weight"]
    port, name = free_port(), f"group-{backend}"
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    body = {**meeting, "group_name": name, "backend": backend}
    joining = threading.Thread(target=server.post, args=("/init_weights_update_group",), kwargs=body)
    joining.start()
    group = init_process_group(backend, f"tcp://127.0.0.1:{port}", 2, 0, name)
    joining.join()
    assert server.post("/begin_weight_update").status_code == 200
    body = {
        "names": [n for n, _ in tensors],
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(t.shape) for _, t in tensors],
        "group_name": name,
        "load_format": "flattened_bucket",
    }
    answers: list[int] = []
    path = "/update_weights_from_distributed"
    receiving = threading.Thread(target=lambda: answers.append(server.post(path, **body).status_code))
    receiving.start()
    dist.broadcast(FlattenedTensorBucket(named_tensors=tensors).flattened_tensor, src=0, group=group)
    receiving.join()
    assert answers == [200] and server.post("/end_weight_update").status_code == 200
    assert server.post("/destroy_weights_update_group", group_name=name).status_code == 200
    dist.destroy_process_group(group)


def test_weights_arrive_over_gloo(server):
    trained = make_model("qwen3", seed=50)
    _broadcast(server, "gloo", "cpu", trained)
    assert gap(server, trained) < 1e-3


def test_weights_arrive_over_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes no two ranks on the same GPU")
    make_checkpoint(tmp_path)
    server = Server(tmp_path, "--device", "cuda", "--base-gpu-id", "1")
    try:
        trained = make_model("qwen3", seed=60)
        _broadcast(server.wait_ready(), "nccl", "cuda:0", trained)
        assert gap(server, trained) < 1e-3
    finally:
        server.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_three_rollouts_with_nothing_but_torch(start_alone, rl_flags, precision) -> None:  # noqa: F811
    kept = [flag for flag in rl_flags if flag != "--fp32"]
    dtype = ["--sglang-dtype", {"--fp32": "float32", "--bf16": "bfloat16"}[precision]]
    sharing = ["--colocate", "--num-gpus-per-node", 1, "--check-weight-update-equal"]
    engine = ["--rollout-engine", "embedded"]
    run = start_alone([*kept, precision, *dtype, *sharing, *engine, "--num-rollout", 3, "--ci-test"])
    run.expect_success(timeout=540)
    rows = run.rows("train")
    assert len(rows) == 3
    limit = {"--fp32": 1e-3, "--bf16": 5e-2}[precision]
    assert all(row["train/train_rollout_logprob_abs_diff"] < limit for row in rows.values())
    run.expect_no_processes()
