"""What SGLang's servers are asked when they get several adapters, by one that answers as 0.5.23 does."""

import pytest
import torch
from fastapi.responses import JSONResponse

from slime.backends.sglang_utils.client import EngineError
from slime.config.lora import LoraConfig
from slime.config.run import run_config
from slime.training.weights import TensorInfo
from slime.utils.tensor_bucket import deserialize_tensors, tensor_sha256
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import AdapterWeights, WeightUpdate
from tests.backends.fsdp_utils.conftest import process_group
from tests.run_args import run_args
from tests.weight_sync.test_handle import Recorder
from tests.weight_sync.test_session import Session

__all__ = ["process_group"]  # a fixture
pytestmark = pytest.mark.usefixtures("process_group")

NAMES = ["a", "b", "c"]
LORA = LoraConfig(lora_rank=2, lora_alpha=8.0, lora_merge=False, lora_adapters=NAMES)
MODULE = "base_model.model.model.layers.0.mlp.up_proj"
LOAD, UNLOAD = "load_lora_adapter_from_tensors", "unload_lora_adapter"


class KeepsAdapters(Recorder):
    """Has adapters by name, and takes none under a name that is taken.

    Attributes:
        loaded: their tensors.
        served: what it has whenever it may generate again: the version, and of each adapter its number.
        refuses: names that it does not take.
    """

    def __init__(self):
        super().__init__()
        self.loaded, self.served, self.refuses, self.paused = {}, [], set(), False
        self.answers |= {LOAD: self.load, UNLOAD: self.unload, "update_weight_version": self.name_version}
        self.answers |= {"pause_generation": self.pause, "continue_generation": self.go_on}

    def load(self, body):
        name = body["lora_name"]
        if name in self.loaded or name in self.refuses or not self.paused:
            return JSONResponse({"success": False, "error_message": f"not {name}"}, status_code=400)
        assert body["config_dict"]["target_modules"] == ["up_proj"] and body["config_dict"]["r"] == 2
        first, second = map(deserialize_tensors, body["serialized_named_tensors"])  # one per rank
        sums = {key: tensor_sha256(tensor) for key, tensor in first.items()}
        assert sums == body["expected_checksums"] and first.keys() == second.keys()
        self.loaded[name] = float(first[f"{MODULE}.lora_B.weight"][0, 0])
        return {"success": True}

    def unload(self, body):
        found = self.loaded.pop(body["lora_name"], None) is not None and self.paused
        return JSONResponse({"success": found}, status_code=200 if found else 400)

    def name_version(self, body):
        self.weight_version = body["new_version"]
        return {"success": True}

    def pause(self, body):
        self.paused = True
        return {"success": True}

    def go_on(self, body):
        self.paused = False
        self.served.append((self.weight_version, dict(self.loaded)))
        return {"success": True}


class Trained:
    """An adapter whose every number is ``value``; the memory of a bucket is used anew after it."""

    ranks, rounding = frozenset({0}), 0.0

    def __init__(self, value):
        self.value = value

    def tensors(self):
        shapes = {"lora_A": (2, 3), "lora_B": (4, 2)}
        return {
            f"{MODULE}.{part}.weight": torch.full(shape, float(self.value)) for part, shape in shapes.items()
        }

    def manifest(self):
        return [TensorInfo(name, tuple(t.shape), t.dtype) for name, t in self.tensors().items()]

    def buckets(self, max_bytes):
        for name, tensor in self.tensors().items():
            yield [(name, tensor)]
            tensor.zero_()


@pytest.fixture
def engines():
    made = [KeepsAdapters().start() for _ in range(2)]
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def trained():
    return {name: Trained(number) for number, name in enumerate(NAMES, 1)}


@pytest.fixture
def update(engines, trained):
    config = run_config(run_args(distributed_timeout_minutes=1))
    beside = [AdapterWeights(weights, LORA, name) for name, weights in trained.items()]
    made = WeightUpdate(config, Trained(0), transports=[Session()], adapters=beside)
    made.connect([EngineEndpoint(engine.url, None, 2, None) for engine in engines])
    return made


def test_engines_go_on_once_each_adapter_has_taken_the_place_of_its_old_version(engines, trained, update):
    update.run(1)
    for weights in trained.values():
        weights.value += 10
    update.run(2)
    wanted = {"1": {"a": 1.0, "b": 2.0, "c": 3.0}, "2": {"a": 11.0, "b": 12.0, "c": 13.0}}
    for engine in engines:
        assert all(loaded == wanted[version] for version, loaded in engine.served)
        assert {version for version, _ in engine.served} == wanted.keys()
        assert [body["lora_name"] for body in engine.seen(UNLOAD)] == NAMES * 2
        assert not engine.paused
        # No answer of an adapter may name the version before it.
        assert engine.paths.index("update_weight_version") < engine.paths.index(LOAD)


def test_the_base_comes_once_for_the_same_engines_and_what_they_hold_of_it_is_looked_at(engines, trained):
    config = run_config(run_args(distributed_timeout_minutes=1, check_weight_checksums=True))
    base = Session()
    sent: list[str] = []
    base.send = lambda bucket, is_last: sent.extend(name for name, _ in bucket) or 0
    for engine in engines:
        engine.answers["weights_checker"] = {"ranks": []}
    beside = [AdapterWeights(trained["a"], LORA, "a")]
    made = WeightUpdate(config, Trained(0), transports=[base], adapters=beside)
    for times in (1, 2):
        made.connect([EngineEndpoint(engine.url, None, 2, None) for engine in engines])
        for version in (1, 2):
            made.run(version)
        assert len(sent) == 2 * times  # A and B of the stand-in for a base
    # After the base and each adapter, then after each adapter alone.
    assert [len(engine.seen("weights_checker")) for engine in engines] == [6, 6]
    # Nothing of it is open when they join again.
    assert [engine.paths.count("end_weight_update") for engine in engines] == [2, 2]


@pytest.mark.parametrize("request_", ["flush_cache", UNLOAD])
def test_no_adapter_comes_where_something_of_the_old_one_may_be_left(engines, update, request_):
    update.run(1)
    engines[1].answers[request_] = JSONResponse({}, status_code=500)
    with pytest.raises(EngineError, match=f"/{request_}: HTTP 500"):
        update.run(2)
    assert len(engines[1].seen(LOAD)) == len(NAMES)


def test_an_adapter_that_one_engine_refuses_leaves_all_of_them_standing_until_the_next_update(
    engines, trained, update
):
    update.run(1)
    engines[1].refuses.add("b")
    trained["a"].value = 11
    before = [len(engine.served) for engine in engines]
    with pytest.raises(EngineError, match="not b"):
        update.run(2)
    assert all(engine.paused for engine in engines)
    assert [len(engine.served) for engine in engines] == before
    engines[1].refuses.clear()
    update.connect([EngineEndpoint(engine.url, None, 2, None) for engine in engines])
    update.run(3)
    for engine in engines:
        assert engine.served[-1] == ("3", {"a": 11.0, "b": 2.0, "c": 3.0})
