from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from slime.utils import http_utils
from slime.utils.deadly_requests import DeadlyRequest, refuse_deadly
from slime.utils.http_utils import init_http_client, post, stream
from tests.backends.sglang_utils.comparison import read_list
from tests.engines import free_port
from tests.run_args import run_args

DEADLY = [request for request in read_list()[0] if request.kills]


@pytest.mark.parametrize("request_", DEADLY, ids=lambda request: request.id)
def test_what_ends_sglang_is_refused(request_: Any) -> None:
    with pytest.raises(DeadlyRequest):
        refuse_deadly(request_.request, vocab_size=320)


@pytest.mark.parametrize(
    "payload",
    [
        {"input_ids": [0, 319]},
        {"input_ids": [[0], [319]], "logprob_start_len": [-1, 0]},
        {"input_ids": []},  # an engine says what is missing
        {"input_ids": ["a", 1]},
        {"text": "a", "logprob_start_len": -1},
        {"text": ["a", "b"]},
        {"text": "", "input_ids": [1]},
        {},
    ],
    ids=str,
)
def test_all_else_is_the_engines_to_judge(payload: dict[str, Any]) -> None:
    refuse_deadly(payload, vocab_size=320)


def test_the_message_has_the_value_and_what_was_wanted() -> None:
    with pytest.raises(DeadlyRequest, match="input_ids: token -7, wanted 0 to 319"):
        refuse_deadly({"input_ids": [[1], [2, -7]]}, vocab_size=320)
    with pytest.raises(DeadlyRequest, match="input_ids: token -7, wanted 0 or more"):
        refuse_deadly({"input_ids": [-7]})


def test_a_list_of_adapters_is_for_several_prompts() -> None:
    for alone in ({"input_ids": [1]}, {"text": "a"}):
        with pytest.raises(DeadlyRequest, match="lora_path: a list for a single prompt"):
            refuse_deadly({**alone, "lora_path": ["a"]})
        refuse_deadly({**alone, "lora_path": "a"})
    refuse_deadly({"input_ids": [[1], [2]], "lora_path": ["a", None]})


async def test_the_runs_own_servers_do_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on these ports: what is let through cannot connect."""
    monkeypatch.setattr(http_utils, "_settings", http_utils._ClientSettings())
    policy, judge = free_port(), free_port()
    routers = {"judge": ("127.0.0.1", judge)}
    where = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": policy, "sglang_model_routers": routers}
    init_http_client(run_args(**where, vocab_size=320))
    urls = [f"http://127.0.0.1:{port}/generate" for port in (policy, judge)]
    for url in urls:
        with pytest.raises(DeadlyRequest):
            await post(url, {"input_ids": [-1]})
        with pytest.raises(DeadlyRequest):
            await anext(stream(url, {"input_ids": [-1]}))
    with pytest.raises(DeadlyRequest):
        await post(urls[0], {"input_ids": [320]})
    own = urlsplit(urls[0])._replace(path="/my_own").geturl()
    for url, ids in ((urls[1], [320]), (own, [-1]), (f"http://127.0.0.1:{free_port()}/generate", [-1])):
        with pytest.raises(httpx.TransportError):
            await post(url, {"input_ids": ids}, max_retries=0)
