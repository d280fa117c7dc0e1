"""SGLang's control plane as the weight sync relies on it; run like test_conformance."""

import base64
import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.utils.distributed_utils import init_process_group
from slime.utils.tensor_bucket import FlattenedTensorBucket
from slime.weight_sync.transports.handle import serialize_bucket
from tests.engines import free_port
from tests.engines.embedded import ENDLESS
from tests.engines.under_test import PROMPT, in_thread

BESIDE = 30
"""Tokens of a request beside another one, which gets about as many meanwhile."""


@pytest.fixture
def engine(engine_under_test):
    engine_under_test.client.continue_generation()
    return engine_under_test


@pytest.fixture
def restored(engine):
    """The engine; afterwards it serves the weights again that it was started with."""
    yield engine
    engine.client.update_weights_from_disk(engine.model_path, weight_version="default")
    engine.client.flush_cache()


def payload(named_tensors: list[tuple[str, torch.Tensor]]) -> str:
    """By value: that is understood everywhere."""
    return base64.b64encode(pickle.dumps(named_tensors)).decode()


def shifted(engine, amount: float) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (name, weight + amount * torch.randn(weight.shape, generator=generator))
        for name, weight in engine.weights.items()
    ]


def greedy(engine) -> list[int]:
    return engine.generate(max_new_tokens=12, temperature=0)["output_ids"]


def finish_types(answers) -> set[str]:
    return {answer["meta_info"]["finish_reason"]["type"] for answer in answers}


def ended(engine, running):
    """The answer of an endless request, aborted once it has gone on beside another one."""
    engine.generate(max_new_tokens=BESIDE)
    engine.client.abort()
    answer = running.result(120)
    assert finish_types([answer]) == {"abort"}
    return answer


def test_an_aborted_request_is_answered_200_with_what_it_has(engine):
    future = engine.start_generating(rid="unit-1")
    engine.client.abort("unit-1")
    answer = future.result(120)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < ENDLESS
    engine.assert_logprobs(PROMPT, answer)


def test_an_abort_matches_by_prefix(engine):
    futures = [engine.start_generating(rid=rid) for rid in ("pre-1", "pre-10")]
    other = engine.start_generating(max_new_tokens=60, rid="else-1")
    engine.client.abort("pre-1")
    assert finish_types(future.result(120) for future in futures) == {"abort"}
    assert finish_types([other.result(120)]) == {"length"}


def test_aborting_an_unknown_request_does_nothing(engine):
    running = engine.start_generating(max_new_tokens=60, rid="prefix-1")
    engine.client.abort("nobody")
    engine.client.abort("prefix")
    assert finish_types([running.result(120)]) == {"length"}


async def test_abort_until_idle(engine):
    futures = [engine.start_generating() for _ in range(3)]
    await abort_servers_until_idle([engine.url])
    assert engine.num_running() == 0
    assert finish_types(future.result(120) for future in futures) == {"abort"}


def test_a_pause_that_aborts_ends_running_requests_and_holds_new_ones(engine):
    running = engine.start_generating()
    with engine.paused("abort"):
        assert finish_types([running.result(120)]) == {"abort"}
        held = engine.pool.submit(engine.generate, PROMPT)
        with pytest.raises(TimeoutError):
            held.result(0.5)
        engine.client.flush_cache(60)
    assert finish_types([held.result(120)]) == {"length"}


def test_requests_behind_a_pause_do_not_count_and_the_engine_is_not_dead(engine):
    with engine.paused("in_place"):
        held = engine.pool.submit(engine.generate, PROMPT)
        with pytest.raises(TimeoutError):
            held.result(0.5)
        (load,) = engine.client.loads()["loads"]
        assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
        assert engine.http.get("/ready").status_code == 503
        assert engine.client.health(timeout=120)
    held.result(120)
    assert engine.client.health(timeout=120)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_other_pauses_let_running_requests_finish_later(engine, mode):
    running = engine.start_generating()
    with engine.paused(mode), pytest.raises(TimeoutError):
        running.result(0.5)
    answer = ended(engine, running)
    assert len(answer["output_ids"]) > BESIDE // 2
    engine.assert_logprobs(PROMPT, answer)


def test_an_unknown_pause_mode_is_a_400(engine):
    with pytest.raises(EngineError) as caught:
        engine.client.pause_generation("nap")
    assert caught.value.status == 400


def test_a_flush_is_refused_while_requests_run(engine):
    running = engine.start_generating()
    assert engine.http.get("/flush_cache").status_code == 400
    engine.client.abort()
    running.result(120)
    engine.client.flush_cache(60)


def test_ready_means_up_and_not_paused(engine):
    # after a health check that failed SGLang is ready only once one has succeeded
    assert engine.client.serves(120)
    assert engine.http.get("/ready").status_code == 200
    with engine.paused("in_place"):
        assert engine.http.get("/ready").status_code != 200


def test_updates_belong_into_a_session(engine):
    client = engine.client
    weights = [payload(list(engine.weights.items()))]
    with pytest.raises(EngineError) as outside:
        client.update_weights_from_tensor(weights)
    with pytest.raises(EngineError) as unopened:
        client.end_weight_update()
    client.begin_weight_update()
    with pytest.raises(EngineError) as twice:
        client.begin_weight_update()
    client.end_weight_update()
    assert [caught.value.status for caught in (outside, unopened, twice)] == [400, 400, 400]


def test_weights_from_tensors_are_served_with_their_version(restored):
    before = greedy(restored)
    checksum = restored.client.weights_checker("checksum")
    with restored.paused("abort"):
        restored.client.flush_cache(60)
        with restored.client.weight_update():
            named = shifted(restored, 0.05)
            half = len(named) // 2
            for bucket in (named[:half], named[half:]):
                restored.client.update_weights_from_tensor([payload(bucket)], weight_version="5")
    assert restored.client.weight_version() == "5"
    assert restored.client.weights_checker("checksum") != checksum
    answer = restored.generate(max_new_tokens=12, temperature=0)
    assert answer["meta_info"]["weight_version"] == "5"
    assert answer["output_ids"] != before
    with torch.no_grad():
        for name, weight in named:
            restored.reference.get_parameter(name).copy_(weight)
    try:
        restored.assert_logprobs(PROMPT, answer)
    finally:
        del restored.reference


def test_a_bucket_in_shared_memory_is_served_as_a_colocated_trainer_sends_it(restored):
    before = greedy(restored)
    bucket = FlattenedTensorBucket(named_tensors=shifted(restored, 0.05))
    with restored.paused("abort"):
        restored.client.flush_cache(60)
        with restored.client.weight_update():
            restored.client.update_weights_from_tensor([serialize_bucket(bucket)], "flattened_bucket", "7")
    assert restored.client.weight_version() == "7"
    assert greedy(restored) != before


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_over_a_process_group(restored, load_format):
    before = greedy(restored)
    name = f"conformance-{load_format}"
    group = join_group(restored, name)
    try:
        with restored.paused("abort"):
            restored.client.flush_cache(60)
            with restored.client.weight_update():
                broadcast(restored, shifted(restored, 0.05), group, name, load_format, "6")
        assert restored.client.weight_version() == "6"
        assert greedy(restored) != before
    finally:
        restored.client.destroy_weights_update_group(name)
        dist.destroy_process_group(group)


def join_group(engine, name: str) -> dist.ProcessGroup:
    port = free_port()
    join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    future = engine.pool.submit(
        engine.client.init_weights_update_group, **join, group_name=name, backend="gloo"
    )
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=name)
    future.result(120)
    return group


def broadcast(engine, named, group, group_name: str, load_format: str | None, version: str) -> None:
    names = [name for name, _ in named]
    tensors = [tensor.contiguous() for _, tensor in named]
    request = engine.pool.submit(
        engine.client.update_weights_from_distributed,
        names,
        [str(tensor.dtype) for tensor in tensors],
        [tuple(tensor.shape) for tensor in tensors],
        group_name,
        load_format,
        version,
    )
    if load_format == "flattened_bucket":
        tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)
    request.result(120)


def test_an_update_during_generation_shows_in_the_version_spans(restored):
    running = restored.start_generating()
    with restored.paused("in_place"), restored.client.weight_update():
        restored.client.update_weights_from_tensor([payload(shifted(restored, 0.01))], weight_version="8")
    answer = ended(restored, running)
    meta = answer["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "8")
    assert first["start"] == 0 and first["end"] == second["start"]
    assert second["start"] < second["end"] == len(answer["output_ids"])
    assert meta["weight_version"] == "8"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_what_goes_on_over_an_update_was_read_by_new_weights_or_by_both(restored, mode):
    """And nothing that begins later by old ones, if its prefix has a key of its own."""
    running, named = restored.start_generating(), shifted(restored, 0.05)
    restored.wait_until(lambda: restored.client.loads()["loads"][0]["num_used_tokens"] > 30)
    with restored.paused(mode):
        assert restored.client.flush_idle_cache() == (mode == "retract")
        with restored.client.weight_update():
            restored.client.update_weights_from_tensor([payload(named)], weight_version="8")
    later = restored.generate(max_new_tokens=4, top={"extra_key": f"8 {mode}"})
    answer = ended(restored, running)
    old, new = restored.reference, copy.deepcopy(restored.reference)
    new.load_state_dict(dict(named), strict=False)
    start = answer["meta_info"]["weight_versions"][1]["start"]
    found, known = logprobs_of(answer), len(PROMPT) + start
    assert found[:start] == pytest.approx(logprobs(answer, old, known)[:start], abs=1e-4)
    anew, kept = logprobs(answer, new, known), logprobs(answer, old, known - 1, new)
    assert found[start:] == pytest.approx((anew if mode == "retract" else kept)[start:], abs=1e-4)
    assert found[start:] != pytest.approx((kept if mode == "retract" else anew)[start:], abs=1e-2)
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    assert later["meta_info"]["cached_tokens"] == 0
    assert logprobs_of(later) == pytest.approx(logprobs(later, new, len(PROMPT)), abs=1e-4)


def logprobs_of(answer) -> list[float]:
    return [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]


def logprobs(answer, reader, known: int, writer=None) -> list[float]:
    """Computes those of an answer as ``writer`` has them behind ``known`` tokens that ``reader`` has read."""
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        read = reader(ids[:, :known], use_cache=True)
        rest = (writer or reader)(ids[:, known:], past_key_values=read.past_key_values)
    rows = torch.cat([read.logits, rest.logits], 1)[0, :-1].log_softmax(-1)
    return rows.gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0].tolist()


def test_the_version_can_be_renamed(restored):
    restored.client.update_weight_version("41")
    assert restored.client.weight_version() == "41"
    assert restored.generate()["meta_info"]["weight_version"] == "41"


def test_a_checkpoint_that_is_missing_is_refused_and_the_old_weights_stay(engine):
    before, version = greedy(engine), engine.client.weight_version()
    with pytest.raises(EngineError) as caught:
        engine.client.update_weights_from_disk("/no/such/checkpoint", weight_version="99")
    assert caught.value.status == 400
    assert engine.client.weight_version() == version
    assert greedy(engine) == before


def test_memory_is_released_and_taken_back_by_tag(restored):
    before = greedy(restored)
    with restored.paused("abort"):
        restored.client.release_memory_occupation()
        restored.client.resume_memory_occupation(["weights"])
        restored.client.update_weights_from_disk(restored.model_path, weight_version="2", flush_cache=False)
        restored.client.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert greedy(restored) == before


def test_leaving_an_unknown_group_is_a_400(engine):
    response = engine.post("/destroy_weights_update_group", group_name="nobody")
    assert response.status_code == 400


def test_many_requests_at_once_are_all_answered(engine):
    futures = [engine.pool.submit(engine.generate, [40 + i, 41], temperature=1.0) for i in range(48)]
    for i, future in enumerate(futures):
        engine.assert_logprobs([40 + i, 41], future.result(120))


def test_a_client_that_leaves_frees_its_slot(engine):
    def leave() -> None:
        body = {"input_ids": PROMPT, "stream": True}
        body["sampling_params"] = {"max_new_tokens": ENDLESS, "ignore_eos": True}
        with engine.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())

    thread: threading.Thread = in_thread(leave)
    thread.join(120)
    engine.wait_until(lambda: engine.num_running() == 0)
