"""Two programs train two tenants at once, over HTTP; each is told what it would be told alone."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from slime_plugins.training_service.client import SamplingClient, ServiceClient, ServiceError
from tests.backends.lora_reference import ALPHA, RANK, save_random
from tests.backends.tenant_reference import (
    ADAMS,
    CLIPS,
    NAMES,
    ROUNDS,
    data_of,
    log_probs_of,
    loss_of,
    trained_alone,
)
from tests.engines import free_port
from tests.page_runs import printed

pytestmark = pytest.mark.e2e

SERVICE = "slime_plugins/training_service/__main__.py"
KEY = "of-the-service"


def _datum(row, loss):
    policy = {"advantages": row["advantages"], "logprobs": row["log_probs"]}
    inputs = {"weights": row["advantages"]} if loss == "cross_entropy" else policy
    return {
        "model_input": row["tokens"][:-1],
        "loss_fn_inputs": {"target_tokens": row["tokens"][1:], **inputs},
    }


def _train(client, name):
    """All rounds of a tenant; what its passes told of each datum."""
    training, told = client.create_lora_training_client(name), []
    for number in range(ROUNDS):
        loss = loss_of(name, number)
        data = [_datum(row, loss) for row in data_of(name, number)]
        passed = training.forward_backward(data, loss, CLIPS if loss == "ppo" else None)
        training.optim_step(**ADAMS[name]._asdict()).result()
        told += [output["logprobs"] for output in passed.result()["loss_fn_outputs"]]
    return training, told


def _expect_served(sampling, model):
    """An answer's log-probs are those of the model."""
    (answer,) = sampling.sample([5, 6, 7], max_tokens=8).result()["sequences"]
    assert len(answer["tokens"]) == 8
    with torch.no_grad():
        wanted = log_probs_of(model, [5, 6, 7, *answer["tokens"]])[2:].tolist()
    assert answer["logprobs"] == pytest.approx(wanted, abs=1e-5)


def test_two_tenants_at_once(start, model, tmp_path) -> None:
    adapter, port = save_random(model, tmp_path / "adapter"), free_port()
    (command,) = printed("python -m slime_plugins.training_service")
    flags = [
        *command.words[3:],
        *("--service-port", port, "--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8),
        *("--rollout-num-gpus", 1, "--max-tokens-per-gpu", 64, "--lora-rank", RANK, "--lora-alpha", ALPHA),
        *("--lora-adapter-path", adapter, "--save", tmp_path / "save", "--served-policy-bound", 1e-5),
        *("--sglang-api-key", KEY),
    ]
    run = start(flags, SERVICE)
    run.wait_for(lambda: "training service: http" in run.output, "the service")
    client = ServiceClient(f"http://127.0.0.1:{port}", KEY)
    with ThreadPoolExecutor(2) as pool:
        trained = dict(zip(NAMES, pool.map(lambda name: _train(client, name), NAMES), strict=True))
    alone = {name: trained_alone(model, adapter, name) for name in NAMES}
    for name, (_, told) in trained.items():
        for found, (_, wanted) in zip(told, alone[name][1], strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)

    alice, bob = (trained[name][0] for name in NAMES)
    _expect_served(alice.save_weights_and_get_sampling_client(), alone["alice"][0])
    _expect_served(bob.save_weights_and_get_sampling_client(), alone["bob"][0])
    row = _datum(data_of("alice", 0)[0], "cross_entropy")
    alice.save_state("end").result()
    alice.forward_backward([row], "cross_entropy").result()
    alice.optim_step(learning_rate=0.1).result()
    # Until it is published, engines have what it was, also when another one is.
    bob.save_weights_and_get_sampling_client()
    _expect_served(SamplingClient(client._http, "alice", 1), alone["alice"][0])
    alice.load_state("end").result()
    (output,) = alice.forward_backward([row], "cross_entropy").result()["loss_fn_outputs"]
    with torch.no_grad():
        wanted = log_probs_of(alone["alice"][0], data_of("alice", 0)[0]["tokens"]).tolist()
    assert output["logprobs"] == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ServiceError, match="HTTP 404"):
        client.create_lora_training_client("carol").optim_step().result()
    tenants, shown = f"http://127.0.0.1:{port}/tenants", {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(tenants).status_code == 401 and httpx.get(tenants, headers=shown).status_code == 200
    assert httpx.get(tenants, headers=shown | {"Host": "evil.example"}).status_code == 403

    run.process.terminate()
    assert run.process.wait(60) == 143
    run.expect_no_processes()
