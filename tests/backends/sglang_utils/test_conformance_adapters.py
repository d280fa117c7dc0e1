"""Several adapters beside the base, as the weight sync and rollouts rely on them; run like test_conformance.

A server at SLIME_CONFORMANCE_URL has to have been started with ``--enable-lora --max-lora-rank 4
--lora-target-modules all``.
"""

import os

import pytest
import torch

from tests.backends.sglang_utils.conftest import CONFORMANCE_URL, conformance_targets
from tests.engines.adapters import RANK, PeftAdapter
from tests.engines.embedded import Server
from tests.engines.under_test import PROMPT, EngineUnderTest

NAMES = ["math", "code.v2", "a-b_3"]
LOAD, UNLOAD = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"


@pytest.fixture(scope="module", params=conformance_targets())
def engine(request, tiny_checkpoint):
    server = None
    if request.param == "embedded":
        server = Server(tiny_checkpoint, "--enable-lora", "--max-lora-rank", str(RANK)).wait_ready()
    target = EngineUnderTest(server.url if server else os.environ[CONFORMANCE_URL], server is not None)
    if not target.client.server_info().get("enable_lora"):
        target.close()
        pytest.skip(f"{target.url} serves without --enable-lora")
    yield target
    target.close()
    if server:
        server.stop()


@pytest.fixture(scope="module")
def adapters(engine):
    """An adapter for each name."""
    return {name: PeftAdapter(engine.reference, seed) for seed, name in enumerate(NAMES, 1)}


@pytest.fixture
def loaded(engine, adapters):
    """The engine with all of them; none is there afterwards."""
    for name, adapter in adapters.items():
        assert engine.post(LOAD, **adapter.body(name)).status_code == 200
    yield engine
    engine.client.continue_generation()
    for name in NAMES:
        engine.post(UNLOAD, lora_name=name)


def ask(engine, name, tokens: int = 8, prompt: list[int] = PROMPT):
    """A greedy answer, with the log-probs of its tokens."""
    return engine.generate(prompt, top={"lora_path": name}, max_new_tokens=tokens, temperature=0)


def expect_of(model, answer, prompt: list[int] = PROMPT) -> None:
    """Expects that the model has chosen each token of the answer, with these log-probs."""
    ids = answer["output_ids"]
    with torch.no_grad():
        table = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    assert table.argmax(-1).tolist() == ids
    found = torch.tensor([row[0] for row in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, table.max(-1).values, atol=1e-4, rtol=0)


def test_requests_at_once_are_each_computed_with_the_adapter_that_they_name(loaded, adapters):
    names = [*NAMES, None, *NAMES[::-1], None]
    answers = [loaded.pool.submit(ask, loaded, name, 24) for name in names]
    for name, answer in zip(names, answers, strict=True):
        expect_of(adapters[name].model if name else loaded.reference, answer.result())
    said = [tuple(answer.result()["output_ids"]) for answer in answers[:4]]
    assert len({*said}) == 4  # or nobody could tell one from another


def test_prompts_of_one_request_may_name_one_each(loaded, adapters):
    names = [*NAMES[:2], None]
    answers = loaded.generate([PROMPT] * 3, top={"lora_path": names}, max_new_tokens=8, temperature=0)
    for name, answer in zip(names, answers, strict=True):
        expect_of(adapters[name].model if name else loaded.reference, answer)


def test_a_name_stands_for_its_new_version_from_the_pause_on_and_for_nothing_between(loaded, adapters):
    """Also for requests that come while it is replaced, and whatever is kept of the prompt."""
    changed, other = NAMES[:2]
    expect_of(adapters[changed].model, ask(loaded, changed))
    new = PeftAdapter(loaded.reference, 99)
    with loaded.paused("abort"):
        early = loaded.pool.submit(ask, loaded, changed)
        assert loaded.post(UNLOAD, lora_name=changed).status_code == 200
        between, beside = loaded.pool.submit(ask, loaded, changed), loaded.pool.submit(ask, loaded, other)
        assert loaded.post(LOAD, **new.body(changed)).status_code == 200
        late = loaded.pool.submit(ask, loaded, changed)
    for answer in (early, between, late):
        expect_of(new.model, answer.result())
    expect_of(adapters[other].model, beside.result())
    expect_of(new.model, ask(loaded, changed))
    expect_of(loaded.reference, ask(loaded, None))


def test_a_name_that_is_not_there_is_refused_and_never_the_base(loaded):
    for name in ("nobody", "math/..", "Math"):
        answer = loaded.try_generate(top={"lora_path": name})
        assert answer.status_code == 400, answer.text
    assert loaded.post(UNLOAD, lora_name="math").status_code == 200
    assert loaded.try_generate(top={"lora_path": "math"}).status_code == 400
    assert loaded.post(UNLOAD, lora_name="math").status_code == 400


def test_a_name_that_is_taken_keeps_what_it_has(loaded, adapters):
    answer = loaded.post(LOAD, **adapters["code.v2"].body("math"))
    assert answer.status_code == 400 and "loaded" in answer.text
    expect_of(adapters["math"].model, ask(loaded, "math"))


def test_an_adapter_of_a_larger_rank_is_refused(loaded, adapters):
    body = adapters["math"].body("larger")
    body["config_dict"]["r"] = 2 * RANK
    assert loaded.post(LOAD, **body).status_code == 400
    assert loaded.try_generate(top={"lora_path": "larger"}).status_code == 400
