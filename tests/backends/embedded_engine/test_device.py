"""The engine on a GPU: everything is where it belongs, and the answers are those of the CPU.

The GPU is a pretended one (`tests/pretend_gpu.py`); `tests/gpu/test_embedded_engine.py` has a real one.
"""

import base64
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing import reductions

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server, engine_device
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs
from slime.utils.tensor_bucket import deserialize_tensors, serialize_tensors
from tests.engines.embedded import make_checkpoint, make_model
from tests.families import tiny_family
from tests.pretend_gpu import GPU, PretendGpu, on_gpu

pytestmark = pytest.mark.slow

ENGINE = "slime.backends.embedded_engine"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine has one."""
    monkeypatch.setattr(f"{ENGINE}.build.gpu_count", lambda: 1)
    monkeypatch.setattr(f"{ENGINE}.build.free_memory", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with torch.inference_mode(), PretendGpu():
        yield


def state(path, **changes) -> ServerState:
    args = {"skip_tokenizer_init": True, "chunked_prefill_size": 24, "context_length": 256, **changes}
    return build_server(EmbeddedServerArgs(model_path=str(path), **args))


KINDS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 20, "min_p": 0.01},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 3},
    {"logit_bias": ((5, 2.0), (9, -3.0))},
]
PROMPTS = [[1, 2, 3], [7] * 9, [4, 5], [*range(3, 60)], [1, 2, 3], [8, 6] * 10]


def requests() -> list[Sequence]:
    """All kinds of sampling; the prompts are short, long enough for several parts, and twice the same."""
    options = LogprobOptions(wanted=True, prompt_start=0, top=2, token_ids=(3, 4))
    return [
        Sequence(
            rid=f"r{number}",
            prompt=SequenceInputs(prompt),
            params=SamplingParams(max_new_tokens=5, ignore_eos=True, **kind),
            logprob_options=options if number % 2 else LogprobOptions(wanted=True),
            noise_seed=number,
        )
        for number, (kind, prompt) in enumerate(zip(KINDS, PROMPTS, strict=True))
    ]


def answers(server: ServerState) -> list[Sequence]:
    scheduler, made = server.engine.scheduler, requests()
    scheduler.waiting.extend(made)
    for _ in range(3):
        scheduler.step(admit=True)
    scheduler.retract()
    while scheduler.live:
        scheduler.step(admit=True)
    return made


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path)
    return path


def test_the_pretended_gpu_refuses_what_a_gpu_refuses(gpu) -> None:
    here, there = torch.zeros(3), torch.zeros(3, device=GPU)
    assert (here.device.type, there.device, (there + there).device) == ("cpu", GPU, GPU)
    assert there.cpu().device.type == "cpu" and on_gpu(there) and there[:2].view(2).is_cuda
    there[:2] = here[:2]
    assert there[torch.tensor([1])].device == GPU
    assert there.mul_(torch.tensor(2.0)) is there
    for wrong in (
        lambda: here + there,
        lambda: here[torch.tensor([1], device=GPU)],
        lambda: torch.cat([there, here]),
        lambda: there.__setitem__([0, 1], here[:2]),
        lambda: there.normal_(generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match=r"host|generator"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


FAMILIES = {
    "qwen3": "our own forward pass",
    "qwen3_moe": "experts",
    "glm4": "transformers, rows",
    "qwen2_moe": "transformers, experts",
    "qwen3_next": "transformers, states",
    "deepseek_v32": "transformers, one sequence after the other",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu(tmp_path, family, request) -> None:
    if family in ("qwen3", "qwen3_moe"):
        make_checkpoint(tmp_path, family)
    else:
        tiny_family(family, tmp_path)
    flags = {"enable_return_routed_experts": "moe" in family}
    with torch.inference_mode():
        expected = answers(state(tmp_path, **flags))
    request.getfixturevalue("gpu")
    server = state(tmp_path, **flags)
    assert server.parameters.flat.device == GPU
    assert {tensor.device for tensor in server.parameters.named.values()} == {GPU}
    for found, one in zip(answers(server), expected, strict=True):
        assert found.output_ids == one.output_ids
        assert found.output_logprobs == one.output_logprobs
        assert found.prompt_logprobs == one.prompt_logprobs
        assert len(found.routes) == len(one.routes)
        assert all(not on_gpu(part) for part in found.routes)
        assert all(map(torch.equal, found.routes, one.routes))


def checksum(server: ServerState) -> str:
    return server.checker.run("checksum", [])["per_engine_checksum"]


def test_weights_reach_a_gpu_by_every_way(gpu, qwen3, tmp_path, monkeypatch) -> None:
    server, expected = state(qwen3), []
    given = make_model("qwen3", seed=1)
    given.save_pretrained(tmp_path)
    updater, named = server.updater, [(n, t.detach()) for n, t in given.named_parameters()]

    def receive(name, ranks) -> None:
        (tensors,) = ranks
        for tensor, (_, sent) in zip(tensors, named, strict=True):
            assert tensor.device == updater.groups.device(name)
            tensor.copy_(sent)

    monkeypatch.setattr(updater.groups, "receive", receive)
    updater.begin("all")
    for device in (torch.device("cpu"), GPU):
        sent = [(name, tensor.to(device)) for name, tensor in named]
        monkeypatch.setattr(
            f"{ENGINE}.weight_updater.deserialize_tensors", lambda text, opened, sent=sent: sent
        )
        server.parameters.flat.zero_()
        updater.from_tensors([""], None, "1", True)
        expected.append(checksum(server))
        server.parameters.flat.zero_()
        updater.groups._groups["g"], updater.groups._devices["g"] = None, device
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        updater.from_group("g", specs, None, "2", False)
        expected.append(checksum(server))
    updater.end()
    server.parameters.flat.zero_()
    updater.from_disk(str(tmp_path), "3", False)
    expected.append(checksum(server))
    assert len({*expected}) == 1
    assert checksum(state(tmp_path)) == expected[0] != checksum(state(qwen3))


def test_memory_of_a_gpu_is_given_back_and_weights_survive_on_the_host(gpu, qwen3) -> None:
    server = state(qwen3, enable_memory_saver=True, enable_weights_cpu_backup=True)
    before, first = checksum(server), answers(server)
    server.checker.run("snapshot", [])
    server.memory.release(None)
    assert server.parameters.flat.untyped_storage().nbytes() == 0
    assert server.engine.cache.k.numel() == 0
    backup = server.parameters._backup
    assert backup is not None and not on_gpu(backup)
    server.memory.resume(None)
    assert checksum(server) == before
    server.checker.run("compare", [])
    assert [s.output_ids for s in answers(server)] == [s.output_ids for s in first]
    server.checker.run("reset_tensors", [])
    with pytest.raises(BadRequest, match="differ"):
        server.checker.run("compare", [])


def test_a_seed_means_the_same_random_weights_on_any_device(qwen3, request) -> None:
    flags = {"load_format": "dummy", "random_seed": 3}
    expected = checksum(state(qwen3, **flags))
    request.getfixturevalue("gpu")
    assert checksum(state(qwen3, **flags)) == expected


@pytest.mark.parametrize(
    ("name", "number", "count", "expected"),
    [
        (None, 0, 0, "cpu"),
        (None, 3, 0, "cpu"),
        (None, 3, 8, "cuda:3"),
        ("cpu", 3, 8, "cpu"),
        ("cuda", 0, 1, "cuda:0"),
        ("cuda", 0, 0, "--device cuda: no GPU is visible to this process (wanted: cpu, or leave it out)"),
        (None, 8, 8, "--base-gpu-id 8: this machine has 8 GPUs (wanted: 0 to 7)"),
    ],
)
def test_where_an_engine_computes(monkeypatch, name, number, count, expected) -> None:
    monkeypatch.setattr(f"{ENGINE}.build.gpu_count", lambda: count)
    try:
        found = str(engine_device(name, number))
    except ValueError as error:
        found = str(error)
    assert found == expected


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_engine_joins_the_groups_that_its_device_can(gpu, qwen3, on_gpu) -> None:
    server = state(qwen3, device="cuda" if on_gpu else "cpu")
    place = "cuda:0" if on_gpu else "cpu"
    wanted = "'gloo' or 'nccl'" if on_gpu else "'gloo'"
    with pytest.raises(BadRequest) as error:
        server.updater.groups.join("127.0.0.1", 1, 1, 2, "g", "mpi")
    assert str(error.value) == (
        f"backend 'mpi': not supported by the embedded engine on {place} (wanted: {wanted})"
    )


class _Handle:
    """Is pickled as a tensor of a GPU is."""

    def __reduce__(self):
        return reductions.rebuild_cuda_tensor, (torch.Tensor, torch.Size([2]), b"handle")


def test_handles_of_gpu_memory_are_read(monkeypatch) -> None:
    taken = []

    def rebuild_cuda_tensor(*args):
        taken.append(args)
        return torch.zeros(2)

    rebuild_cuda_tensor.__module__ = reductions.__name__
    rebuild_cuda_tensor.__qualname__ = "rebuild_cuda_tensor"
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    (found,) = deserialize_tensors(serialize_tensors([_Handle()]))
    assert torch.equal(found, torch.zeros(2))
    assert taken == [(torch.Tensor, torch.Size([2]), b"handle")]


def test_a_handle_of_gpu_memory_is_an_error_where_there_is_no_gpu() -> None:
    buffer = io.BytesIO()
    pickle.dump([_Handle()], buffer)
    with pytest.raises(ValueError, match="serialized tensors"):
        deserialize_tensors(base64.b64encode(buffer.getvalue()).decode())
