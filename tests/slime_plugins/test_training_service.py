"""The routes of the training service, over stand-ins of trainer and engines: order, refusals, ends."""

import asyncio
import math
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from fastapi.testclient import TestClient

from slime.arguments.core.flag import option_string
from slime.utils.http_utils import HttpStatusError
from slime_plugins.training_service import __main__ as command
from slime_plugins.training_service import tenants as module
from slime_plugins.training_service.app import create_app
from slime_plugins.training_service.client import ServiceError, TrainingClient
from slime_plugins.training_service.sampling import EngineSampler
from slime_plugins.training_service.schema import AdamParams, Sample
from slime_plugins.training_service.tenants import Tenants
from tests.each import hold_each
from tests.run_args import config_with, with_groups

INPUTS = {"target_tokens": [2, 3], "weights": [1.0, 0.5]}
DATUM = {"model_input": [1, 2], "loss_fn_inputs": INPUTS}
OF_POLICY = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
SAMPLE = {"prompt": [1], "sampling_params": {"max_tokens": 4}}


class Trainer:
    """Notes what it is asked; two ranks tell of every second datum each."""

    def __init__(self):
        self.calls, self.updates, self.finite, self.loss = [], [], True, 1.0
        self.gate = threading.Event()
        self.gate.set()
        self.error = None

    def call_all(self, what, method, *arguments):
        self.gate.wait(60)
        if self.error:
            raise self.error
        if method == "serve_tenants":
            return [None, None]
        self.calls.append(arguments)
        if arguments[0] == "forward_backward":
            count = len(arguments[2])
            return [
                {n: (n * self.loss if n else 0.0, [-1.0 * n]) for n in range(first, count, 2)}
                for first in (1, 0)
            ]
        return [self.finite, True] if arguments[0] == "optim_step" else [None, None]

    def update_weights(self, adapters=None):
        self.updates.append(adapters)


async def sampled(name, asked):
    if asked.prompt == [7]:
        raise HttpStatusError("POST", "http://engine", 400, "too long")
    return {"sequences": [name]}


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def made(trainer, tmp_path):
    """`made(**options)`: the tenants of a service, and a client of it."""

    def make(save=str(tmp_path), **options):
        flags = dict(lora_rank=8, lora_alpha=16, lora_merge=False, lora_adapters=["alice", "bob"])
        config = config_with(**flags, save=save, max_tokens_per_gpu=8, context_parallel_size=2, vocab_size=50)
        tenants = Tenants(config, trainer)
        return tenants, TestClient(create_app(tenants, sampled, **options), raise_server_exceptions=False)

    return make


@pytest.fixture
def client(made):
    return made()[1]


def asked(client, path, status=200, /, **body):
    answer = client.post(f"/tenants/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_pass_tells_the_log_probs_of_each_datum_in_order(client, trainer):
    answer = asked(client, "alice/forward_backward", **PASS | {"data": [DATUM] * 3})
    assert answer["loss_fn_outputs"] == [{"logprobs": [-1.0 * n]} for n in range(3)]
    assert answer["metrics"] == {"loss:sum": 3.0}
    datum = {"tokens": [1, 2, 3], "advantages": [1.0, 0.5], "log_probs": [0.0, 0.0]}
    assert trainer.calls == [("forward_backward", "alice", [datum] * 3, "cross_entropy", {})]


def test_losses_of_a_policy_have_log_probs_and_clips(client, trainer):
    datum, clips = {"model_input": [1, 2], "loss_fn_inputs": OF_POLICY}, {"clip_low_threshold": 0.5}
    asked(client, "bob/forward_backward", data=[datum], loss_fn="ppo", loss_fn_config=clips)
    ((_, _, (found,), *loss),) = trainer.calls
    assert found == {"tokens": [1, 2, 3], "advantages": [1.0, -1.0], "log_probs": [-1.0, -2.0]}
    assert loss == ["ppo", clips]


def test_what_does_not_fit_is_refused_by_name(client, trainer):
    def refused(row):
        body, word = row[1]
        assert word in str(asked(client, "alice/forward_backward", 422, **PASS | body)), word

    def of(**inputs):
        return {"data": [{"model_input": [1, 2], "loss_fn_inputs": INPUTS | inputs}]}

    hold_each(
        {
            "another loss": ({"loss_fn": "dpo"}, "loss_fn"),
            "no data": ({"data": []}, "data"),
            "no shift": (of(target_tokens=[3, 4]), "one place further"),
            "longer": (of(target_tokens=[2, 3, 4], weights=[1.0] * 3), "one place further"),
            "weights": (of(weights=[1.0]), "weights has 1 entries (wanted: 2"),
            "too many inputs": (of(advantages=[1.0, 1.0]), "has advantages, weights (wanted: weights)"),
            "too few inputs": ({"loss_fn": "ppo"}, "has weights (wanted: advantages, logprobs)"),
            "a field nobody reads": (of(mask=[1, 1]), "mask"),
            "a fraction of a token": ({"data": [DATUM | {"model_input": [1.0, 2]}]}, "model_input"),
            "clips of no clipping": ({"loss_fn_config": {"clip_low_threshold": 0.5}}, "wanted: loss_fn ppo"),
            "clips of another name": ({"loss_fn_config": {"epsilon": 0.5}}, "epsilon"),
        }.items(),
        refused,
    )
    assert trainer.calls == []


def test_no_body_at_all_is_refused_where_one_is_wanted(client, trainer):
    for work in ("forward_backward", "save_state", "load_state", "sample"):
        assert client.post(f"/tenants/alice/{work}").status_code == 422, work
    assert trainer.calls == []


def test_tokens_that_the_model_or_a_micro_batch_has_no_place_for(client, trainer):
    wide = {"model_input": [49], "loss_fn_inputs": {"target_tokens": [50], "weights": [1.0]}}
    told = asked(client, "alice/forward_backward", 409, **PASS | {"data": [DATUM, wide]})
    assert told["detail"] == "token 50: not in the vocabulary (wanted: below 50)"
    long = {"model_input": [1] * 16, "loss_fn_inputs": {"target_tokens": [1] * 16, "weights": [1.0] * 16}}
    told = asked(client, "alice/forward_backward", 409, **PASS | {"data": [long]})
    assert "a datum of 17 tokens (wanted: at most 16" in told["detail"]
    assert "token 50" in asked(client, "alice/sample", 409, **SAMPLE | {"prompt": [50]})["detail"]
    assert trainer.calls == []


def test_a_step_wants_gradients_of_its_tenant(client, trainer):
    asked(client, "bob/forward_backward", **PASS)
    assert "alice has no gradients" in asked(client, "alice/optim_step", 409)["detail"]
    asked(client, "bob/optim_step", learning_rate=0.5, grad_clip_norm=1.0)
    name, tenant, adam = trainer.calls[-1]
    assert (name, tenant) == ("optim_step", "bob")
    assert adam._asdict() == dict(
        learning_rate=0.5, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=1.0
    )
    assert "bob has no gradients" in asked(client, "bob/optim_step", 409)["detail"]
    assert "beta1" in str(asked(client, "bob/optim_step", 422, beta1=1.0))


def test_gradients_that_are_not_finite_end_nothing(client, trainer):
    trainer.finite, trainer.loss = False, math.inf
    told = asked(client, "alice/forward_backward", **PASS | {"data": [DATUM] * 2})
    assert told["metrics"] == {"loss:sum": None}
    assert "not finite; they are forgotten" in asked(client, "alice/optim_step", 409)["detail"]
    trainer.finite = True
    asked(client, "alice/forward_backward", **PASS)
    asked(client, "alice/optim_step")


def test_engines_get_the_weights_of_the_tenant_that_asks(made, trainer):
    tenants, client = made()
    tenants.begin()
    asked(client, "bob/save_weights_for_sampler")
    assert trainer.calls[-1] == ("publish", "bob") and trainer.updates == [None, ["bob"]]


def test_states_are_kept_under_names(client, trainer, tmp_path):
    path = str(tmp_path / "tenants" / "alice" / "one")
    assert asked(client, "alice/save_state", name="one") == {"path": path}
    assert trainer.calls == [("save_state", "alice", path)]


@pytest.fixture
def kept(made, trainer, tmp_path):
    """Has a state saved."""
    tenants, client = made()
    asked(client, "alice/save_state", name="one")
    return tenants, client, str(tmp_path / "tenants" / "alice" / "one")


def test_a_state_is_loaded_by_its_tenant_or_another(kept, trainer):
    _, client, path = kept
    asked(client, "bob/forward_backward", **PASS)
    asked(client, "bob/load_state", name="one", of="alice")
    assert trainer.calls[-1] == ("load_state", "bob", path)
    asked(client, "bob/optim_step", 409)  # its gradients were of other weights
    assert "is no saved state" in asked(client, "bob/load_state", 409, name="one")["detail"]
    assert "one is there already" in asked(client, "alice/save_state", 409, name="one")["detail"]
    assert "of alice (wanted: bob" in asked(client, "bob/save_state", 409, name="two", of="alice")["detail"]
    for name in ("../alice", "", "a/b", ".hidden"):
        asked(client, "alice/save_state", 422, name=name)
        asked(client, "alice/load_state", 422, name="one", of=name)


def test_a_state_of_another_run_s_form_is_refused(kept, monkeypatch):
    tenants, client, _ = kept
    form = tenants._form()
    monkeypatch.setattr(tenants, "_form", lambda: form | {"world_size": 8})
    told = asked(client, "alice/load_state", 409, name="one")["detail"]
    assert told == f"load_state: one was saved with world_size {form['world_size']} (wanted: 8)"


def test_without_a_place_there_are_no_states(made):
    assert "--save DIR" in asked(made(save=None)[1], "alice/save_state", 409, name="one")["detail"]


def test_there_are_the_tenants_of_the_run(client, trainer):
    assert client.get("/tenants").json() == {"tenants": ["alice", "bob"]}
    bodies = {"forward_backward": PASS, "sample": SAMPLE, "save_state": {"name": "x"}, "optim_step": {}}
    for what, body in bodies.items():
        assert "wanted: alice, bob" in asked(client, f"carol/{what}", 404, **body)["detail"]
    assert trainer.calls == []


def test_samples_are_the_engines(client):
    assert asked(client, "bob/sample", **SAMPLE) == {"sequences": ["bob"]}
    assert "too long" in asked(client, "bob/sample", 400, **SAMPLE | {"prompt": [7]})["detail"]
    assert "max_tokens" in str(asked(client, "bob/sample", 422, prompt=[1], sampling_params={}))


def test_engines_are_asked_with_the_tenant_s_adapter(monkeypatch):
    seen = []

    async def post(url, body, retries, headers):
        seen.append((url, body, headers))
        meta = {"output_token_logprobs": [[-0.5, 9, None]], "finish_reason": {"type": "stop"}}
        return {"meta_info": meta | {"weight_version": "3"}}

    monkeypatch.setattr("slime_plugins.training_service.sampling.post", post)
    wanted = Sample.model_validate(SAMPLE | {"num_samples": 2})
    found = asyncio.run(EngineSampler("http://router", "key")("alice", wanted))
    answer = {"tokens": [9], "logprobs": [-0.5], "stop_reason": "stop", "weight_version": "3"}
    assert found == {"sequences": [answer] * 2}
    url, body, headers = seen[0]
    assert url == "http://router/generate" and headers == {"Authorization": "Bearer key"}
    assert body["lora_path"] == "alice" and body["input_ids"] == [1] and body["return_logprob"]
    assert body["sampling_params"]["max_new_tokens"] == 4 and len(seen) == 2


def test_keys_and_pages_of_other_sites(made):
    _, client = made(host="127.0.0.1", api_key="secret")
    key = {"Authorization": "Bearer secret", "Host": "127.0.0.1:8890"}
    assert client.get("/tenants", headers=key).status_code == 200
    assert client.get("/tenants", headers=key | {"Authorization": "Bearer other"}).status_code == 401
    assert client.get("/tenants", headers=key | {"Host": "evil.example"}).status_code == 403
    assert client.get("/tenants", headers=key | {"Origin": "http://evil.example"}).status_code == 403


def test_requests_are_done_one_after_the_other_in_their_order(client, trainer):
    trainer.gate.clear()
    training = [TrainingClient(client, name, 1) for name in ("alice", "bob")]
    first = training[0].forward_backward([DATUM], "cross_entropy")
    steps = [training[0].optim_step(), training[0].forward_backward([DATUM], "cross_entropy")]
    other = training[1].forward_backward([DATUM], "cross_entropy")
    trainer.gate.set()
    for future in [first, *steps, other]:
        future.result(60)
    of_alice = [method for method, name, *_ in trainer.calls if name == "alice"]
    assert of_alice == ["forward_backward", "optim_step", "forward_backward"]
    with pytest.raises(ServiceError, match="no gradients"):
        training[1].optim_step().result(60)
        training[1].optim_step().result(60)


def test_a_deadline_says_whether_the_work_was_begun(made, trainer):
    tenants, client = made(deadline_s=0.2)
    trainer.gate.clear()
    assert "it goes on" in asked(client, "alice/forward_backward", 504, **PASS)["detail"]
    assert "nothing was done" in asked(client, "bob/forward_backward", 503, **PASS)["detail"]
    trainer.gate.set()
    tenants.submit("alice", tenants.optim_step, AdamParams()).result(60)
    assert [name for _, name, *_ in trainer.calls] == ["alice", "alice"]


def test_no_more_wait_than_may(made, trainer, monkeypatch):
    monkeypatch.setattr(module, "WAITING_LIMIT", 2)
    _, client = made()
    trainer.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.post, "/tenants/alice/forward_backward", json=PASS) for _ in range(8)]
        for answer in wait(answers, 60, FIRST_COMPLETED).done:
            assert answer.result().status_code == 429 and answer.result().headers["Retry-After"] == "1"
        trainer.gate.set()
    assert {answer.result().status_code for answer in answers} == {200, 429}


def test_a_failure_of_a_rank_is_told_and_ends_the_service(made, trainer):
    tenants, client = made()
    trainer.error = RuntimeError("rank 1 ended")
    assert "rank 1 ended" in asked(client, "alice/forward_backward", 500, **PASS)["detail"]
    assert tenants.ended.is_set() and tenants.failure is trainer.error
    trainer.error = None
    assert "the service ends" in asked(client, "bob/forward_backward", 500, **PASS)["detail"]
    assert trainer.calls == []


def test_flags_that_tenants_cannot_have_are_refused_by_name():
    given = dict(lora_rank=8, lora_merge=False, lora_adapters=["alice"])
    assert list(command.refusal(with_groups(given))) == []
    (line,) = command.refusal(with_groups({**given, "lora_adapters": []}))
    assert line == "--lora-adapters: missing (wanted: the names of the tenants)"
    values = {"num_experts": 4, "policies": ["a.yaml"], "optimizer": "sgd", "train_backend": "fsdp"}
    for name in command._ONLY:
        value = values.get(name, True)
        (line,) = command.refusal(with_groups({**given, name: value}))
        assert line.startswith(f"{option_string(name)} ") and "not in a training service" in line
