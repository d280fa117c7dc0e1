"""Weights that come in over the three transports, and what is refused."""

import base64
import fcntl
import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from slime.utils.distributed_utils import init_process_group
from slime.utils.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata, serialize_tensors
from slime.weight_sync.versions.codec import bytes_in, checksum, difference
from slime.weight_sync.versions.manifest import Entry
from slime.weight_sync.versions.staged import StagedChanges, StagedVersion
from tests.engines.embedded import (
    ENDLESS,
    LONG,
    Server,
    free_port,
    make_checkpoint,
    make_model,
    token_logprobs,
)

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("updated")
    make_checkpoint(path)
    server = Server(path, "--random-seed", "7")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def serves(server: Server, model) -> bool:
    """Whether the engine's log-probs are those of the model."""
    answer = server.generate(PROMPT, {"max_new_tokens": 4, "ignore_eos": True}, return_logprob=True)
    expected = token_logprobs(model, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5


def update(server: Server, endpoint: str, status: int = 200, **body):
    assert server.post("/begin_weight_update").status_code == 200
    response = server.post(endpoint, **body)
    assert server.post("/end_weight_update").status_code == 200
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_tensors_arrive_by_handle_and_by_value(server, share, load_format):
    model = make_model("qwen3", seed=10 + share + 2 * (load_format is None))
    payload = list(model.state_dict().items())
    if load_format:
        bucket = FlattenedTensorBucket(named_tensors=payload)
        payload = {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}
    text = serialize_tensors(payload, share=share)
    update(
        server,
        "/update_weights_from_tensor",
        serialized_named_tensors=[text],
        load_format=load_format,
        weight_version=f"{share}{load_format}",
    )
    assert serves(server, model)
    assert server.client.get("/model_info").json()["weight_version"] == f"{share}{load_format}"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_tensors_arrive_by_broadcast(server, load_format):
    model = make_model("qwen3", seed=20 + (load_format is None))
    tensors = [(n, t) for n, t in model.state_dict().items() if n != "lm_head.weight"]
    name, port = f"group-{load_format}", free_port()
    joining = threading.Thread(
        target=server.post,
        args=("/init_weights_update_group",),
        kwargs={
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": "gloo",
        },
    )
    joining.start()
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, 0, name)
    joining.join()
    assert server.post("/begin_weight_update").status_code == 200
    answers = []
    receiving = threading.Thread(
        target=lambda: answers.append(
            server.post(
                "/update_weights_from_distributed",
                names=[n for n, _ in tensors],
                dtypes=["float32"] * len(tensors),
                shapes=[list(t.shape) for _, t in tensors],
                group_name=name,
                load_format=load_format,
                weight_version="7",
            )
        )
    )
    receiving.start()
    if load_format:
        dist.broadcast(FlattenedTensorBucket(named_tensors=tensors).flattened_tensor, src=0, group=group)
    else:
        for _, tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0, group=group)
    receiving.join()
    told = answers[0].json()
    assert told.pop("commit_time") > 0
    assert told == {"success": True, "message": "Succeeded to update model weights."}
    assert server.post("/end_weight_update").status_code == 200
    assert serves(server, model)
    assert server.post("/destroy_weights_update_group", group_name=name).status_code == 200
    assert server.post("/destroy_weights_update_group", group_name=name).status_code == 400
    dist.destroy_process_group(group)


def test_a_checkpoint_on_disk_replaces_the_weights_or_leaves_them(server, tmp_path):
    model = make_checkpoint(tmp_path / "good", seed=30)
    answer = server.post(
        "/update_weights_from_disk", model_path=str(tmp_path / "good"), weight_version="disk"
    )
    assert answer.status_code == 200 and answer.json()["num_paused_requests"] == 0
    assert serves(server, model)
    make_checkpoint(tmp_path / "narrow", seed=31, intermediate_size=32)
    for path in (tmp_path / "narrow", tmp_path / "nowhere"):
        answer = server.post("/update_weights_from_disk", model_path=str(path), weight_version="bad")
        assert answer.status_code == 400 and not answer.json()["success"]
    assert serves(server, model)
    info = server.client.get("/model_info").json()
    assert info["weight_version"] == "disk" and info["model_path"] == str(tmp_path / "good")


def test_nothing_is_computed_while_an_update_is_open(server):
    """Also on an engine that nobody paused: between two buckets half of its weights are new."""
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    half = serialize_tensors([("model.norm.weight", torch.full((64,), 0.5))], share=False)
    answers: list[dict] = []
    server.post("/update_weight_version", new_version="before")
    assert server.post("/begin_weight_update").status_code == 200
    waiting = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, sampling)))
    waiting.start()
    for version in (None, "after"):
        body = {"serialized_named_tensors": [half], "weight_version": version, "flush_cache": False}
        assert server.post("/update_weights_from_tensor", **body).status_code == 200
        time.sleep(0.3)
        server.post("/continue_generation")
        assert not answers
    assert server.post("/end_weight_update").status_code == 200
    waiting.join(60)
    assert [span["version"] for span in answers[0]["meta_info"]["weight_versions"]] == ["after"]


def used(server: Server) -> int:
    """Tokens of requests that run."""
    return server.client.get("/v1/loads").json()["loads"][0]["num_used_tokens"]


def test_an_update_begins_when_what_runs_has_ended(server):
    answers: list[dict] = []
    sampling = {"max_new_tokens": LONG, "ignore_eos": True}
    running = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, sampling)))
    running.start()
    while used(server) < 20 and not answers:
        time.sleep(0.002)
    assert server.post("/begin_weight_update").status_code == 200
    running.join(60)
    assert answers[0]["meta_info"]["completion_tokens"] == LONG
    assert server.post("/end_weight_update").status_code == 200


def test_a_checkpoint_is_loaded_when_what_runs_has_ended(server, tmp_path):
    model = make_checkpoint(tmp_path, seed=32)
    answers: list[dict] = []
    sampling = {"max_new_tokens": LONG, "ignore_eos": True}
    server.post("/update_weight_version", new_version="before")
    running = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, sampling)))
    running.start()
    while used(server) < 20 and not answers:
        time.sleep(0.002)
    body = {"model_path": str(tmp_path), "weight_version": "after", "flush_cache": False}
    assert server.post("/update_weights_from_disk", **body).status_code == 200
    running.join(60)
    assert [span["version"] for span in answers[0]["meta_info"]["weight_versions"]] == ["before"]
    assert serves(server, model)


def test_what_runs_is_ended_where_an_update_asks_for_that(server):
    answers: list[dict] = []
    sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    running = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, sampling)))
    running.start()
    while used(server) < 20 and not answers:
        time.sleep(0.002)
    body = {"serialized_named_tensors": [], "abort_all_requests": True}
    assert server.post("/update_weights_from_tensor", **body).status_code == 400  # no update is open
    running.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_pipe_instead_of_weights_is_refused(server, tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    answer = server.client.post("/update_weights_from_disk", json={"model_path": str(tmp_path)}, timeout=60)
    assert answer.status_code == 400 and "is not a file" in answer.json()["message"]


def test_an_update_needs_an_open_session_and_sessions_do_not_nest(server):
    text = serialize_tensors([], share=False)
    assert server.post("/update_weights_from_tensor", serialized_named_tensors=[text]).status_code == 400
    assert server.post("/end_weight_update").status_code == 400
    assert server.post("/begin_weight_update").status_code == 200
    assert server.post("/begin_weight_update").status_code == 400
    assert server.post("/end_weight_update").status_code == 200


def test_bad_payloads_are_refused_and_change_nothing(server):
    before = server.post("/weights_checker", action="checksum").json()
    norm = torch.zeros(64)
    blocked = base64.b64encode(pickle.dumps(os.getcwd)).decode()
    wrong = {
        "not base64": "%%%",
        "not a pickle": base64.b64encode(b"hello").decode(),
        "a function": blocked,
        "no pairs": serialize_tensors([1, 2], share=False),
        "unknown name": serialize_tensors([("model.norm.weight", norm), ("nope", norm)], share=False),
        "wrong shape": serialize_tensors([("model.norm.weight", torch.zeros(3))], share=False),
        "imaginary": serialize_tensors([("model.norm.weight", norm.to(torch.complex64))], share=False),
        "integers": serialize_tensors([("model.norm.weight", norm.long())], share=False),
    }
    for payload in wrong.values():
        update(server, "/update_weights_from_tensor", 400, serialized_named_tensors=[payload])
    entry = FlattenedTensorMetadata("model.norm.weight", torch.Size([64]), torch.float32, 0, 256, 64)
    data = norm.view(torch.uint8)
    eighths = torch.zeros(64, dtype=torch.uint8), replace(entry, dtype=torch.float8_e4m3fn, end_idx=64)
    for flat, one in [
        eighths,
        (data[None], entry),
        (torch.zeros(256), entry),
        (data, replace(entry, name=7)),
    ]:
        bucket = serialize_tensors({"flattened_tensor": flat, "metadata": [one]}, share=False)
        body = {"serialized_named_tensors": [bucket], "load_format": "flattened_bucket"}
        update(server, "/update_weights_from_tensor", 400, **body)
    assert server.post("/weights_checker", action="checksum").json() == before


def test_a_handle_whose_memory_is_gone_is_refused(server):
    payload = base64.b64decode(serialize_tensors([("model.norm.weight", torch.zeros(64))], share=True))
    text = base64.b64encode(payload.replace(b"/torch_", b"/wrong_")).decode()
    update(server, "/update_weights_from_tensor", 400, serialized_named_tensors=[text])
    assert server.client.get("/health").status_code == 200


def test_broadcasts_are_checked_before_anything_is_received(server):
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    update(server, "/update_weights_from_distributed", 400, **body, group_name="unknown")
    for change in ({"dtypes": ["float31"]}, {"shapes": [[64], [1]]}):
        update(server, "/update_weights_from_distributed", 400, **{**body, **change})
    for size in (-1, 2**41):
        refused = update(server, "/update_weights_from_distributed", 400, **{**body, "shapes": [[size]]})
        assert "shapes: wanted sizes" in str(refused)
    group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    for change in ({"rank_offset": 0, "backend": "gloo"}, {"rank_offset": 1, "backend": "nccl"}):
        assert server.post("/init_weights_update_group", **group, **change).status_code == 400


def test_the_checker_sees_a_single_changed_weight(server):
    assert server.post("/weights_checker", action="snapshot").status_code == 200
    assert server.post("/weights_checker", action="compare").status_code == 200
    checksums = server.post("/weights_checker", action="checksum").json()["ranks"][0]["checksums"]
    text = serialize_tensors([("model.norm.weight", torch.full((64,), 1.5))], share=False)
    update(server, "/update_weights_from_tensor", serialized_named_tensors=[text])
    changed = server.post("/weights_checker", action="checksum").json()["ranks"][0]["checksums"]
    assert [name for name in checksums if checksums[name] != changed[name]] == ["model.norm.weight"]
    comparison = server.post("/weights_checker", action="compare")
    assert comparison.status_code == 400 and "model.norm.weight" in comparison.json()["message"]
    skipped = {"action": "compare", "skip_tensor_list": ["model.norm.weight"]}
    assert server.post("/weights_checker", **skipped).status_code == 200
    values = server.post("/get_weights_by_name", name="model.norm.weight", truncate_size=3).json()
    assert values == [1.5, 1.5, 1.5]
    others = [name for name in checksums if name != "model.norm.weight"]
    server.post("/weights_checker", action="reset_tensors", skip_tensor_list=others)
    reset = server.post("/weights_checker", action="checksum").json()["ranks"][0]["checksums"]
    assert [name for name in reset if reset[name] != changed[name]] == ["model.norm.weight"]


def test_responses_say_which_tokens_which_version_made(server):
    server.post("/update_weight_version", new_version="a")
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(
            server.generate(PROMPT, {"max_new_tokens": ENDLESS, "ignore_eos": True})
        )
    )
    thread.start()
    while used(server) < 20:
        time.sleep(0.002)
    server.post("/pause_generation", mode="in_place")
    text = serialize_tensors([("model.norm.weight", torch.full((64,), 0.5))], share=False)
    update(
        server,
        "/update_weights_from_tensor",
        serialized_named_tensors=[text],
        weight_version="b",
        flush_cache=False,
    )
    frozen = used(server)
    server.post("/continue_generation")
    while used(server) < frozen + 20:
        time.sleep(0.002)
    server.post("/abort_request", abort_all=True)
    thread.join()
    first, second = answers[0]["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == ("a", 0)
    assert (second["version"], second["start"], second["end"]) == (
        "b",
        first["end"],
        len(answers[0]["output_ids"]),
    )
    assert second["end"] > second["start"]
    assert answers[0]["meta_info"]["weight_version"] == "b"


def test_changes_are_fetched_while_it_generates_and_loaded_as_a_checkpoint(server, tmp_path):
    """Only the load stops it; a version that cannot be made is refused, and the weights stay."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    first, second = make_model("qwen3", seed=40), make_model("qwen3", seed=41)
    base = _publish(StagedVersion(shared, 1), first, tmp_path)
    staged = StagedChanges(shared, 2, base, "xor")
    for name, tensor in _named(second):
        data = tensor.contiguous()
        found = difference(bytes_in(data), bytes_in(dict(_named(first))[name]), "xor")
        if found is not None:
            digest = checksum("xxh3-128", bytes_in(data))
            entry = Entry(tuple(data.shape), "float32", "", digest)
            staged.write_changes({name: (entry, found.payload)})
    staged.publish(tmp_path)
    body = {"local_checkpoint_dir": str(local), "source_dir": str(shared)}
    local.mkdir()
    with (local / ".lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another reader of the machine has it
        pulled = pool.submit(server.post, "/pull_weights", **body, target_version=2)
        for _ in range(20):
            assert server.client.get("/health", timeout=120).status_code == 200
            time.sleep(0.02)
        assert not serves(server, second) and not pulled.done()
        lock.close()
        path = pulled.result(600).json()["path"]
    assert path == str(local / "weight_v000002") and not serves(server, second)
    assert server.post("/update_weights_from_disk", model_path=path).status_code == 200
    assert serves(server, second)
    refused = server.post("/pull_weights", **body, target_version=3)
    assert refused.status_code == 400 and "weight_v000003: is no version" in refused.json()["message"]
    relative = server.post("/pull_weights", **{**body, "source_dir": "shared"}, target_version=2)
    assert relative.status_code == 400 and "wanted: an absolute path" in relative.json()["message"]
    assert serves(server, second)


def _named(model):
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


def _publish(staged, model, assets):
    (assets / "config.json").write_text(json.dumps(model.config.to_dict()))
    staged.write(_named(model))
    return staged.publish(assets)
