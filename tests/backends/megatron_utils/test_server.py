"""The server that says how likely a Megatron model finds tokens, against ``transformers``' models."""

import asyncio
import math
import time
from argparse import ArgumentParser
from collections import Counter

import httpx
import pytest
import torch
import transformers
from aiohttp import BasicAuth
from aiohttp.test_utils import TestClient, TestServer

from slime.backends.megatron_utils.server.app import LogProbApp
from slime.backends.megatron_utils.server.arguments import (
    MegatronServerConfig,
    add_megatron_server_arguments,
    configure_megatron_server_args,
    validate_megatron_server_args,
)
from slime.backends.megatron_utils.server.model import LogProbModel, Question
from slime.config.run import filled
from slime.rollout.on_policy_distillation import post_process_rewards
from slime.utils.types import Sample
from tests.each import hold_each
from tests.engines import free_port
from tests.forking import ForkedScript, forking
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.page_runs import printed
from tests.run_args import plugin_args

IDS = [7, 3, 250, 3, 9, 9, 120, 44, 1, 200, 13]
NEAR = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    shape = {"num_hidden_layers": 2}
    return [save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", seed=seed, **shape) for seed in (0, 1)]


def log_probs_of(checkpoint, ids):
    """[L, V], by ``transformers``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def answers(rank, args, questions):
    model = LogProbModel(args)
    return [model.answer(Question(**question)) for question in questions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], ids=str
)
def test_a_model_says_what_transformers_says_in_every_layout(checkpoints, layout):
    args = configure_megatron_server_args(make_args(checkpoints[0], **layout))
    args.teacher_sample_reduction_chunk_size = args.teacher_label_reduction_chunk_size = 4
    each = [[token, 255] for token in IDS]
    questions = [
        {"ids": IDS, "sample_n": 300, "labels": [5, 0]},
        {"ids": IDS, "labels": each},
        {"ids": IDS[:1], "sample_n": 1},
    ]
    told = run_ranks(answers, math.prod(layout.values()), args, questions)
    assert all(other == told[0] for other in told)
    whole, plain, shortest = told[0]
    wanted = log_probs_of(checkpoints[0], IDS)
    assert whole["log_probs"] == plain["log_probs"] and shortest["log_probs"] == []
    near(whole["log_probs"], wanted[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0])
    near(whole["label_token_log_probs"], wanted[:, [5, 0]])
    near(plain["label_token_log_probs"], wanted.gather(1, torch.tensor(each)))
    drawn = torch.tensor(whole["sampled_token_ids"])
    near(whole["sampled_log_probs"], wanted.gather(1, drawn))
    assert drawn.shape == (len(IDS), 300) and "sampled_token_ids" not in plain
    for row, tokens in zip(wanted, drawn.tolist(), strict=True):
        likely = int(row.argmax())
        share, found = float(row[likely].exp()), Counter(tokens)[likely] / 300
        assert abs(found - share) < 6 * math.sqrt(share * (1 - share) / 300) + 1e-9


def near(found, wanted):
    torch.testing.assert_close(torch.tensor(found), wanted, atol=NEAR, rtol=NEAR)


@pytest.mark.slow
def test_a_teacher_is_asked_over_http_and_given_other_weights(checkpoints, tmp_path):
    forking()  # before ports are chosen
    port, early, log = free_port(), free_port(), tmp_path / "log"
    (command,) = printed("torchrun")  # eight ranks there, one here
    *_, module = command.words[: command.words.index("--hf-checkpoint")]
    words = [*command.words[command.words.index("--hf-checkpoint") :], "--hf-checkpoint", checkpoints[0]]
    words += ["--tensor-model-parallel-size", "1"]
    words += ["--teacher-port", str(port), "--teacher-warmup-port", str(early)]
    words += ["--megatron-server-max-length", "20"]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = ForkedScript(module, words, log, env=threads)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False) as client:
            wait_ready(client, process, log)
            first = client.post("/generate", json={"input_ids": IDS}).json()
            wanted = log_probs_of(checkpoints[0], IDS)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
            near(first["log_probs"], wanted)
            assert client.post("/generate", json={"input_ids": IDS * 2}).status_code == 413
            engine_s = {"max_new_tokens": 0, "temperature": 0.5}
            body = {"input_ids": IDS, "return_logprob": True, "sampling_params": engine_s}
            sample = Sample(tokens=IDS, response_length=4, reward=client.post("/generate", json=body).json())
            post_process_rewards(plugin_args(), [sample])
            near(sample.teacher_log_probs, wanted[-4:])
            updated = client.post("/update_weights_from_disk", json={"model_path": checkpoints[1]})
            assert updated.status_code == 200, updated.text
            assert client.get("/info").json()["model_path"] == checkpoints[1]
            other = client.post("/generate", json={"input_ids": IDS}).json()["log_probs"]
            near(
                other, log_probs_of(checkpoints[1], IDS)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
            )
            assert (torch.tensor(other) - wanted).abs().max() > 0.1
            empty = client.post("/update_weights_from_disk", json={"model_path": str(tmp_path)})
            assert empty.status_code == 400 and "no *.safetensors files" in empty.text
            assert client.post("/generate", json={"input_ids": IDS}).status_code == 503
            back = client.post("/update_weights_from_disk", json={"model_path": checkpoints[0]})
            assert back.status_code == 200, back.text
            near(client.post("/generate", json={"input_ids": IDS}).json()["log_probs"], wanted)
    finally:
        process.kill()


def wait_ready(client, process, log):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(log.read_text())


def args_with(**values):
    """Flags of a model, as the parser of a run knows them, with the server's."""
    model = {"load": None, "hf_checkpoint": "model", "vocab_size": 256, "params_dtype": torch.float32}
    args = plugin_args(**model, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    vars(args).update(values)
    return configure_megatron_server_args(args)


@pytest.fixture
async def idle():
    """An application whose ranks do nothing, and a client of it."""
    app = LogProbApp(filled(MegatronServerConfig, args_with(megatron_server_max_length=8)))
    app.state = ""
    async with TestClient(TestServer(app.app)) as client:
        yield app, client


BAD = {
    "no object": [],
    "no tokens": {"input_ids": []},
    "text": {"input_ids": "abc"},
    "beyond the vocabulary": {"input_ids": [256]},
    "generates": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}},
    "many samples": {"input_ids": [1], "sample_n": 1025},
    "no samples": {"input_ids": [1], "sample_n": -1},
    "part of a sample": {"input_ids": [1], "sample_n": 1.0},
    "a token that is none": {"input_ids": [1, True]},
    "a negative token": {"input_ids": [-1]},
    "no labels in a row": {"input_ids": [1], "label_token_ids": [[]]},
    "label beyond the vocabulary": {"input_ids": [1, 2], "label_token_ids": [-1]},
    "labels of other tokens": {"input_ids": [1, 2], "label_token_ids": [[1]]},
    "labels of two lengths": {"input_ids": [1, 2], "label_token_ids": [[1], [1, 2]]},
}


async def test_what_cannot_be_answered_is_refused_before_the_ranks_hear_of_it(idle, tmp_path):
    app, client = idle
    for name, body in BAD.items():
        assert (await client.post("/generate", json=body)).status == 400, name
    assert (await client.post("/generate", json={"input_ids": [1] * 9})).status == 413
    assert (await client.post("/generate", data="[" * 100_000)).status == 400
    foreign = {"Origin": "http://elsewhere.example"}
    assert (await client.post("/generate", json={"input_ids": [1]}, headers=foreign)).status == 403
    gone = {"path": str(tmp_path / "gone")}
    assert (await client.post("/update_weights_from_disk", json=gone)).status == 400
    for seconds in (-1, 10**400, math.nan):
        wrong = {"path": str(tmp_path), "timeout_s": seconds}
        assert (await client.post("/update_weights_from_disk", json=wrong)).status == 400, seconds
    assert app.work.empty() and not app.state


GOOD = [
    ({"input_ids": [0, 255]}, {"ids": [0, 255], "sample_n": 0, "labels": []}),
    ({"input_ids": [1] * 8}, {"ids": [1] * 8, "sample_n": 0, "labels": []}),
    ({"input_ids": [1], "sample_n": 1024}, {"ids": [1], "sample_n": 1024, "labels": []}),
    ({"input_ids": [1], "label_token_ids": [0, 255]}, {"ids": [1], "sample_n": 0, "labels": [0, 255]}),
    (
        {"input_ids": [1, 2], "label_token_ids": [[3, 4], [5, 6]], "sample_n": None},
        {"ids": [1, 2], "sample_n": 0, "labels": [[3, 4], [5, 6]]},
    ),
    (
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}, "label_token_ids": None},
        {"ids": [1], "sample_n": 0, "labels": []},
    ),
    ({"input_ids": [1], "sampling_params": {}}, {"ids": [1], "sample_n": 0, "labels": []}),
]


async def test_what_the_ranks_are_asked_is_what_the_request_says(idle):
    """Up to every limit, and what comes back is passed on."""
    app, client = idle
    for number, (body, wanted) in enumerate(GOOD):
        asked = asyncio.create_task(client.post("/generate", json=body))
        work = await asyncio.to_thread(app.work.get, timeout=60)
        assert (work.what, work.about) == ("answer", wanted)
        loads = await (await client.get("/get_loads")).json()
        assert loads == {"num_requests": 1, "num_tokens": len(wanted["ids"])}
        work.outcome.set_result({"log_probs": [-0.5] * (len(wanted["ids"]) - 1)})
        answer = await (await asked).json()
        assert answer == {"request_id": str(number), "log_probs": [-0.5] * (len(wanted["ids"]) - 1)}
    assert await (await client.get("/get_loads")).json() == {"num_requests": 0, "num_tokens": 0}


async def test_a_prompt_is_told_of_as_an_engine_does(idle):
    app, client = idle
    asked = asyncio.create_task(
        client.post("/generate", json={"input_ids": [3, 4, 5], "return_logprob": True})
    )
    work = await asyncio.to_thread(app.work.get, timeout=60)
    work.outcome.set_result({"log_probs": [-1.0, -2.0]})
    assert (await (await asked).json())["meta_info"] == {
        "input_token_logprobs": [[None, 3, None], [-1.0, 4, None], [-2.0, 5, None]],
        **{"prompt_tokens": 3, "completion_tokens": 0, "finish_reason": {"type": "length", "length": 0}},
    }


async def test_a_server_says_what_it_is(idle):
    _, client = idle
    told = {path: await (await client.get(path)).json() for path in ("/detect", "/healthz", "/info")}
    assert told == {
        "/detect": {"type": "megatron"},
        "/healthz": {"status": "ok"},
        "/info": {
            **{"vocab_size": 256, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
            **{"model_path": "model", "max_length": 8},
        },
    }


async def test_a_server_that_starts_answers_nothing_and_takes_no_other_weights(tmp_path):
    app = LogProbApp(filled(MegatronServerConfig, args_with(load="/first")))
    async with TestClient(TestServer(app.app)) as client:
        health = await client.get("/healthz")
        assert (health.status, await health.json()) == (503, {"status": "starting"})
        refused = await client.post("/generate", json={"input_ids": [1]})
        assert (refused.status, await refused.json()) == (503, {"error": "starting"})
        update = await client.post("/update_weights_from_disk", json={"load": str(tmp_path)})
        assert (update.status, await update.json()) == (409, {"error": "starting"})
        assert (await (await client.get("/info")).json())["model_path"] == "/first"
    assert app.work.empty()


async def test_nothing_is_answered_while_weights_are_replaced(idle, tmp_path):
    app, client = idle
    update = {"load": str(tmp_path), "timeout_s": 0.05}
    late = await client.post("/update_weights_from_disk", json=update)
    assert late.status == 504 and "weights are being updated" in (await late.json())["error"]
    assert (await client.post("/update_weights_from_disk", json=update)).status == 409
    assert (await client.post("/generate", json={"input_ids": [1]})).status == 503
    assert (await client.get("/healthz")).status == 503
    work = app.work.get_nowait()
    assert (work.what, work.about) == ("load", str(tmp_path)) and app.work.empty()
    work.outcome.set_result(None)
    assert (await client.get("/healthz")).status == 200
    assert (await (await client.get("/info")).json())["model_path"] == str(tmp_path)


async def test_nothing_is_answered_after_weights_that_could_not_be_loaded_but_other_weights_help(
    idle, tmp_path
):
    app, client = idle
    for reason, status in (("no tensor 'model.norm.weight'", 400), (None, 200)):
        update = asyncio.create_task(client.post("/update_weights_from_disk", json={"load": str(tmp_path)}))
        work = await asyncio.to_thread(app.work.get, timeout=60)
        work.outcome.set_result(reason)
        assert (await update).status == status
        answer = await client.get("/healthz")
        assert answer.status == (503 if reason else 200) and (reason or "ok") in await answer.text()
    assert (await (await client.get("/info")).json())["model_path"] == str(tmp_path)


async def test_requests_show_the_key_as_a_token_or_in_their_address():
    app = LogProbApp(filled(MegatronServerConfig, args_with()), "secret")
    app.state = ""
    async with TestClient(TestServer(app.app)) as client:
        assert (await client.get("/healthz")).status == 200
        for shown, status in {
            "Bearer secret": 200,
            BasicAuth("student", "secret").encode(): 200,
            "Bearer other": 401,
            BasicAuth("secret", "other").encode(): 401,
            "secret": 401,
            "Basic ?": 401,
            "": 401,
        }.items():
            answer = await client.get("/info", headers={"Authorization": shown})
            assert answer.status == status, shown
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"GET /info HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()


def test_a_key_is_required_beyond_loopback(monkeypatch):
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"^--teacher-host 0.0.0.0: no key .* \(wanted: TEACHER_API_KEY"):
        validate_megatron_server_args(args_with(teacher_host="0.0.0.0"))
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    validate_megatron_server_args(args_with(teacher_host="0.0.0.0"))


def test_flags_are_on_the_command_line_or_in_the_environment(monkeypatch):
    parse = lambda *words: add_megatron_server_arguments(ArgumentParser()).parse_args(words)
    assert (parse().teacher_port, parse().megatron_server_warmup) == (7999, True)
    assert parse("--no-megatron-server-warmup").megatron_server_warmup is False
    monkeypatch.setenv("TEACHER_PORT", "8123")
    monkeypatch.setenv("MEGATRON_SERVER_WARMUP", "off")
    assert (parse().teacher_port, parse().megatron_server_warmup) == (8123, False)
    assert parse("--teacher-port", "1").teacher_port == 1
    assert args_with(teacher_host="0.0.0.0").teacher_port == 8123
    monkeypatch.setenv("TEACHER_WARMUP_TIMEOUT_S", "soon")
    with pytest.raises(
        ValueError, match=r"TEACHER_WARMUP_TIMEOUT_S 'soon' .* \(wanted: as --teacher-warmup-time"
    ):
        parse()


REFUSED = [
    ({"teacher_port": 0}, "--teacher-port 0 (wanted: 1 to 65535)"),
    ({"teacher_port": 65536}, "--teacher-port 65536 (wanted: 1 to 65535)"),
    ({"teacher_warmup_timeout_s": 0.0}, "--teacher-warmup-timeout-s 0.0 (wanted: at least 0.001)"),
    (
        {"teacher_label_reduction_chunk_size": 0},
        "--teacher-label-reduction-chunk-size 0 (wanted: at least 1)",
    ),
    ({"megatron_server_max_length": -1}, "--megatron-server-max-length -1 (wanted: at least 0)"),
    (
        {"context_parallel_size": 2},
        "--context-parallel-size 2: the log-prob server has none (wanted: each rank",
    ),
    (
        {"tensor_model_parallel_size": 2},
        "WORLD_SIZE 1: the log-prob server has one replica (wanted: 2 processes",
    ),
]


def test_values_that_the_server_cannot_use_are_refused_by_name():
    validate_megatron_server_args(args_with())

    def check(case):
        values, message = case
        args = args_with()
        vars(args).update(values)
        with pytest.raises(ValueError) as refused:
            validate_megatron_server_args(args)
        assert str(refused.value).startswith(message)

    hold_each(REFUSED, check, least=7)
