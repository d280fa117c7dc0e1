"""Servers started in particular ways: keys, memory, determinism."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.engines.embedded import Server, make_checkpoint
from tests.forking import ForkedScript

pytestmark = pytest.mark.slow

READERS = [
    *(
        ("/weights_checker", {"action": action})
        for action in ("checksum", "snapshot", "compare", "reset_tensors")
    ),
    ("/get_weights_by_name", {"name": "model.norm.weight"}),
]


@pytest.fixture
def start():
    servers = []

    def run(path, *flags, **kwargs) -> Server:
        servers.append(Server(path, *flags, **kwargs))
        return servers[-1].wait_ready()

    yield run
    for server in servers:
        server.stop()


def status(server: Server, method: str, path: str, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.client.request(method, path, headers=headers, json={}).status_code


def test_each_endpoint_asks_for_its_key(checkpoint, start):
    server = start(checkpoint[0], "--api-key", "user", "--admin-api-key", "admin")
    for path in ("/health", "/ready"):
        assert status(server, "GET", path, None) == 200
    for path in ("/model_info", "/v1/models", "/server_info"):
        assert [status(server, "GET", path, key) for key in (None, "admin", "user")] == [401, 401, 200]
    for path in ("/continue_generation", "/flush_cache"):
        assert [status(server, "POST", path, key) for key in (None, "user", "admin")] == [401, 401, 200]
    assert server.post("/generate", input_ids=[1]).json() == {"error": "Unauthorized"}
    server_info = server.client.get("/server_info", headers={"Authorization": "Bearer user"})
    assert "admin" not in server_info.text.replace("admin_api_key", "")


def test_the_api_key_controls_where_there_is_no_admin_key(checkpoint, start):
    server = start(checkpoint[0], "--api-key", "user")
    assert [status(server, "POST", "/flush_cache", key) for key in (None, "user")] == [401, 200]


def test_released_weights_free_memory_and_survive_with_a_backup(tmp_path, start):
    make_checkpoint(tmp_path, vocab_size=40000, hidden_size=256)
    flags = ("--enable-memory-saver", "--skip-tokenizer-init", "--context-length", "64")
    for backup in (False, True):
        extra = ("--enable-weights-cpu-backup",) if backup else ()
        server = start(tmp_path, *flags, *extra)
        process = psutil.Process(server.process.pid)
        before = server.post("/weights_checker", action="checksum").json()
        used = process.memory_info().rss
        assert server.post("/release_memory_occupation").status_code == 200
        if not backup:
            assert used - process.memory_info().rss > 35e6
        assert server.client.get("/health").status_code == 200
        server.post("/begin_weight_update")
        refused = server.post("/update_weights_from_tensor", serialized_named_tensors=["x"])
        assert refused.status_code == 400 and "released" in refused.json()["message"]
        for path, body in READERS:
            refused = server.post(path, **body)
            assert refused.status_code == 400 and "released" in refused.json()["message"]
        server.post("/end_weight_update")
        assert server.post("/resume_memory_occupation").status_code == 200
        assert (server.post("/weights_checker", action="checksum").json() == before) == backup
        assert server.generate([1], {"max_new_tokens": 2, "ignore_eos": True})["output_ids"]


def test_deterministic_results_depend_on_nothing_but_the_request(checkpoint, start):
    server = start(
        checkpoint[0],
        "--enable-deterministic-inference",
        "--chunked-prefill-size",
        "32",
        "--stream-interval",
        "4",
    )

    def run(i: int):
        prompt = [(11 * (i % 4) + j) % 256 for j in range(5 + 20 * (i % 4))]
        sampling = {"max_new_tokens": 6 + 5 * (i % 7), "sampling_seed": i // 4, "ignore_eos": True}
        answer = server.generate(prompt, sampling, return_logprob=True, top_logprobs_num=2)
        meta = answer["meta_info"]
        return answer["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]

    alone = [run(i) for i in range(28)]
    with ThreadPoolExecutor(28) as pool:
        for _ in range(2):
            assert list(pool.map(run, range(28))) == alone
    assert (
        server.generate([1, 2], {"max_new_tokens": 5})["output_ids"]
        == (server.generate([1, 2], {"max_new_tokens": 5})["output_ids"])
    )


def test_streams_can_be_deltas(checkpoint, start):
    flags = ("--incremental-streaming-output", "--allow-auto-truncate", "--context-length", "512")
    server = start(checkpoint[0], *flags)
    sampling = {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True}
    plain = server.generate([1, 2], sampling)
    assert len(plain["output_ids"]) == 510
    body = {"input_ids": [1, 2], "sampling_params": sampling, "stream": True}
    lines = server.client.post("/generate", json=body).text.split("\n\n")[:-2]
    chunks = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]
    assert [token for c in chunks for token in c["output_ids"]] == plain["output_ids"]
    assert "".join(c["text"] for c in chunks) == plain["text"]


def test_termination_does_not_wait_for_paused_requests(checkpoint, start):
    server = start(checkpoint[0])
    server.post("/pause_generation")
    # The head of a stream is here once the server has the request.
    with server.client.stream("POST", "/generate", json={"input_ids": [1], "stream": True}) as answer:
        server.process.terminate()
        assert b"the server is shutting down" in answer.read()
    server.process.wait(60)


@pytest.mark.parametrize("change", [{"model_type": "gpt2"}, {"rope_scaling": {"rope_type": "yarn"}}, None])
def test_a_model_that_cannot_be_served_is_one_line_on_stderr(tmp_path, change):
    make_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    if change is None:
        config.unlink()
    else:
        import json

        raw = json.loads(config.read_text())
        raw.pop("rope_parameters", None)
        config.write_text(json.dumps({**raw, **change}))
    errors, words = tmp_path / "errors", ["--model-path", str(tmp_path)]
    engine = ForkedScript("slime.backends.embedded_engine", words, tmp_path / "log", errors)
    assert engine.wait(600) == 1
    assert errors.read_text().strip().splitlines()[-1].startswith("error: ")
