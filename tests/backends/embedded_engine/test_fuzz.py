"""Thousands of requests, from nearly right to nonsense: none is answered with a 5xx, and the server lives."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slime.backends.embedded_engine.sampling_params import UNSUPPORTED, SamplingParams
from slime.utils.tensor_bucket import serialize_tensors
from tests.engines.embedded import Server, make_checkpoint

PER_EXAMPLE = 20
# a request that waits for a pause to end is given up after this many seconds
READ_TIMEOUT_S = 0.05

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 0.5, 1e-9, 2**31, 2**63, 2**64, -(2**63), 1e308, 319, 320]),
    st.integers(-3, 40),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXT = st.text(max_size=12)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
IDS = st.lists(st.integers(0, 319), min_size=1, max_size=40)
FEW = st.integers(0, 4)
STOPS = st.one_of(TEXT, st.lists(TEXT, max_size=3), st.sampled_from(["(a+)+$", "[", "\\", ".*", "(?R)"]))


def mapping(fields: dict, size: int = 6):
    """Objects with some of these fields, each mostly plausible and sometimes anything."""
    known = [st.tuples(st.just(k), st.one_of(v, v, v, JSON)) for k, v in fields.items()]
    entries = st.lists(st.one_of(*known), max_size=size)
    return st.one_of(entries.map(dict), entries.map(dict), st.dictionaries(TEXT, JSON, max_size=2))


PLAUSIBLE = {
    "max_new_tokens": FEW,
    "min_new_tokens": FEW,
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "stop": STOPS,
    "stop_regex": STOPS,
    "stop_token_ids": st.lists(st.integers(0, 400), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-2, 330).map(str), NUMBERS, max_size=3),
}
SAMPLING = mapping(
    {**dict.fromkeys([*SamplingParams.__dataclass_fields__, *UNSUPPORTED], SCALARS), **PLAUSIBLE}
)
FLAG = st.booleans()
RID = st.one_of(st.sampled_from(["a", "ab"]), st.lists(TEXT, max_size=2))
GENERATE = mapping(
    {
        "input_ids": st.one_of(IDS, st.lists(IDS, max_size=3)),
        "text": st.one_of(TEXT, st.lists(TEXT, max_size=3)),
        "sampling_params": st.one_of(SAMPLING, st.lists(SAMPLING, max_size=3)),
        "rid": RID,
        "return_logprob": FLAG,
        "logprob_start_len": st.integers(-2, 40),
        "top_logprobs_num": st.integers(0, 400),
        "token_ids_logprob": st.lists(st.integers(0, 330), max_size=3),
        "return_text_in_logprobs": FLAG,
        "return_prompt_token_ids": FLAG,
        "stream": FLAG,
        "lora_path": SCALARS,
    },
    size=9,
).map(lambda body: {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, **body})
MESSAGES = st.lists(mapping({"role": st.sampled_from(["user", "tool"]), "content": TEXT}), max_size=2)
OPENAI = {"max_tokens": FEW, "n": FEW, "stream": FLAG, "seed": NUMBERS, "stop": STOPS, "temperature": NUMBERS}
PAYLOADS = [
    serialize_tensors(value, share=False) for value in ([], {}, [("model.norm.weight", 1)], [[1, 2]], 7, None)
]
UPDATE = {"load_format": st.sampled_from(["flattened_bucket", "direct", "x"]), "weight_version": TEXT}
GROUP = {"group_name": TEXT, "world_size": st.integers(-1, 1), "rank_offset": NUMBERS, "master_port": NUMBERS}
TAGS = mapping({"tags": st.lists(st.sampled_from(["kv_cache", "weights", "cuda_graph", "x"]), max_size=2)})
ENDPOINTS = {
    "/generate": GENERATE,
    "/v1/completions": mapping({"prompt": st.one_of(TEXT, IDS), "logprobs": NUMBERS, **OPENAI}),
    "/v1/chat/completions": mapping({"messages": MESSAGES, "logprobs": FLAG, "top_logprobs": FEW, **OPENAI}),
    "/tokenize": mapping({"prompt": st.one_of(TEXT, st.lists(TEXT))}),
    "/detokenize": mapping({"tokens": st.one_of(IDS, st.lists(IDS))}),
    "/abort_request": mapping({"rid": RID, "abort_all": FLAG}),
    "/pause_generation": mapping({"mode": st.sampled_from(["abort", "retract", "in_place", "x"])}),
    "/continue_generation": JSON,
    "/flush_cache": JSON,
    "/release_memory_occupation": TAGS,
    "/resume_memory_occupation": TAGS,
    "/begin_weight_update": mapping({"selector": st.sampled_from(["all", "target", "draft"])}),
    "/end_weight_update": JSON,
    "/update_weights_from_tensor": mapping(
        {
            "serialized_named_tensors": st.lists(st.one_of(st.sampled_from(PAYLOADS), TEXT), max_size=2),
            **UPDATE,
        }
    ),
    "/update_weights_from_distributed": mapping(
        {
            "names": st.just(["model.norm.weight"]),
            "dtypes": st.sampled_from([["float32"], ["x"], ["nn"]]),
            "shapes": st.sampled_from([[[64]], [[-1]], [[2**62, 2**62]], [[]]]),
            "group_name": TEXT,
            **UPDATE,
        }
    ),
    "/update_weights_from_disk": mapping({"model_path": st.one_of(TEXT, st.just("/tmp"))}),
    "/update_weight_version": mapping({"new_version": TEXT, "abort_all_requests": FLAG}),
    "/init_weights_update_group": mapping(GROUP).filter(lambda body: body.get("world_size", 0) in (-1, 0, 1)),
    "/destroy_weights_update_group": mapping({"group_name": TEXT}),
    "/get_weights_by_name": mapping({"name": st.sampled_from(["model.norm.weight", "x"])}),
    "/weights_checker": mapping({"action": st.sampled_from(["checksum", "snapshot", "compare", "x"])}),
    "/v1/models/x": JSON,
}
WEIGHTED = [*ENDPOINTS, *["/generate"] * 12, *["/v1/completions", "/v1/chat/completions"] * 2]


@st.composite
def a_request(draw) -> tuple[str, str, bytes]:
    path = draw(st.sampled_from(WEIGHTED))
    method = draw(st.sampled_from(["POST"] * 12 + ["GET", "PUT"]))
    if draw(st.integers(0, 15)) == 0:
        return method, path, draw(st.binary(max_size=20))
    return method, path, json.dumps(draw(ENDPOINTS[path])).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzzed")
    make_checkpoint(path, num_hidden_layers=1)
    server = Server(path, "--context-length", "64", "--max-running-requests", "8", "--enable-memory-saver")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def restore(server: Server) -> None:
    server.post("/resume_memory_occupation")
    server.post("/end_weight_update")
    server.post("/continue_generation")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1000, pytest.param(5000, marks=pytest.mark.nightly)])
def test_no_request_brings_the_server_down(server, number):
    sent, statuses = 0, {}
    timeout = httpx.Timeout(600, read=READ_TIMEOUT_S)

    @settings(
        max_examples=number // PER_EXAMPLE,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(a_request(), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def fuzz(requests):
        nonlocal sent
        for method, path, content in requests:
            sent += 1
            try:
                status = server.client.request(method, path, content=content, timeout=timeout).status_code
            except httpx.ReadTimeout:
                status = 0
            assert status < 500, (method, path, content, server.report())
            statuses[status] = statuses.get(status, 0) + 1
        restore(server)

    fuzz()
    assert sent >= number
    # both the paths that refuse and the paths that compute were visited; on a busy machine many are given up
    assert statuses[200] > number // 100 and statuses[400] > number // 100
    restore(server)
    assert server.process.poll() is None and server.client.get("/health").status_code == 200
    answer = server.generate([1, 2, 3], {"max_new_tokens": 5, "ignore_eos": True}, return_logprob=True)
    assert len(answer["output_ids"]) == 5
