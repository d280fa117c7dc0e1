"""The stock router finds the engine, sends it requests and leaves answers as they are."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.engines import free_port


@pytest.fixture(scope="module")
def router():
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    ports = ["--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    process = subprocess.Popen([*command, *ports], start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                httpx.get(url + "/liveness", timeout=600)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_requests_pass_through_the_router(router, shared_server):
    assert httpx.post(router + "/workers", timeout=600, json={"url": shared_server.url}).status_code == 202
    deadline = time.monotonic() + 600
    while not [w for w in httpx.get(router + "/workers", timeout=600).json()["workers"] if w["is_healthy"]]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
    routed = httpx.post(router + "/generate", timeout=600, json=body)
    assert routed.status_code == 200
    direct = shared_server.generate([1, 2, 3], sampling, return_logprob=True)
    assert routed.json()["output_ids"] == direct["output_ids"]
    assert routed.json()["meta_info"]["output_token_logprobs"] == direct["meta_info"]["output_token_logprobs"]
    refused = httpx.post(router + "/generate", timeout=600, json={"input_ids": [10**6]})
    assert refused.status_code == 400 and "not in [0, 320)" in refused.text
    chat = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert httpx.post(router + "/v1/chat/completions", timeout=600, json=chat).status_code == 200
