"""An engine is killed or stopped in the middle of each rollout function.

The rollout ends, every group has its place in the books, and each token is of the weights that its sample
names, also after another engine has taken the lost one's place. Engines, router, fleet, watch and rollout
manager are those of a run; the trainer sends checkpoints from disk.
"""

import asyncio
import json
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.arguments import validated_args
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.ray.rollout_manager import RolloutManager
from slime.rollout import generation, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import stop_worker
from slime.rollout.generate_state import GenerateState
from slime.utils.types import EngineEndpoint, Sample
from slime.utils.weight_clock import clock
from tests.engines.embedded import ENDLESS, make_checkpoint, token_logprobs
from tests.engines.forked import Blow
from tests.ray.forked_engines import ForkedEngine, ForkedEngines, manager_of
from tests.ray.stand_ins import wait_until

pytestmark = pytest.mark.slow

BATCH, SAMPLES, ROLLOUTS = 4, 2, 3
OVER_SAMPLING = ["--over-sampling-batch-size", 2 * BATCH]  # some wait for their turn when the batch is full
STREAMING = ["--custom-generate-function-path", "slime.rollout.sglang_streaming_rollout.generate_streaming"]
FULLY_ASYNC = ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"]
REJECTION = ["--rollout-function-path", "slime.rollout.rejection_sampling.generate_rollout"]
FUNCTIONS: dict[str, list[Any]] = {
    "default": [],
    "default, partial": [*OVER_SAMPLING, "--partial-rollout"],
    "default, aborting": OVER_SAMPLING,
    "streaming": [*STREAMING, *OVER_SAMPLING, "--keep-surplus-groups"],
    "streaming, aborting": [*STREAMING, *OVER_SAMPLING, "--partial-rollout", "--use-slime-router"],
    "fully async": [*FULLY_ASYNC, "--max-staleness", 2],
    "fully async, streaming": [*FULLY_ASYNC, *STREAMING, "--use-slime-router"],
}
MAY_BE_DROPPED = {"default, aborting": {"aborted", "surplus"}, "streaming": {"aborted"}}
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])


async def parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float(sum(sample.tokens) % 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.nn.Module]]:
    """Checkpoint and model by the names of ``weights_of``."""
    root = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 32, "intermediate_size": 48}
    versions = ("default", "odd", "even")
    return {
        name: (root / name, make_checkpoint(root / name, seed=seed, **shape))
        for seed, name in enumerate(versions)
    }


@pytest.fixture
def flags(models: dict[str, Any], tmp_path: Path) -> list[Any]:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"What is {i} + {i}?", "label": ""}) + "\n" for i in range(64))
    )
    return [
        *("--hf-checkpoint", models["default"][0], "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--prompt-data", data, "--input-key", "prompt", "--rollout-max-response-len", 48),
        *("--custom-rm-path", f"{__name__}.parity_reward", "--num-rollout", ROLLOUTS),
        *(
            "--rollout-batch-size",
            BATCH,
            "--n-samples-per-prompt",
            SAMPLES,
            "--global-batch-size",
            BATCH * SAMPLES,
        ),
        *("--rollout-num-gpus", 2, "--use-fault-tolerance", "--sglang-server-concurrency", 3),
    ]


@pytest.fixture
def start(
    flags: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., RolloutManager]]:
    """Starts a manager with more flags, which has engines of the weights they were started with."""
    managers: list[RolloutManager] = []

    def begin(*more: Any) -> RolloutManager:
        clock.__init__()  # type: ignore[misc]
        GenerateState.clear()
        args = validated_args([str(word) for word in [*flags, *more]])
        managers.append(manager_of(args, monkeypatch, tmp_path))
        managers[-1].start()
        return managers[-1]

    yield begin
    stop_worker()
    for manager in managers:
        manager.dispose()


class Trainer:
    """Gives engines the weights of the next version, from disk, as a weight update does."""

    def __init__(self, manager: RolloutManager, models: dict[str, Any]) -> None:
        self.manager, self.models, self.version = manager, models, 0

    def update(self) -> None:
        self.version += 1
        try:
            self._send(self.manager.updatable_engines()[0])
        except EngineError:
            self._send(self.manager.updatable_engines(suspicious=True)[0])
        self.manager.weights_updated(self.version)

    def _send(self, engines: list[EngineEndpoint]) -> None:
        clients = [EngineClient(engine) for engine in engines]
        for client in clients:
            client.pause_generation()
        for client in clients:
            client.flush_cache()
            path = str(self.models[weights_of(str(self.version))][0])
            client.update_weights_from_disk(path, weight_version=str(self.version))
        for client in clients:
            client.continue_generation()


def weights_of(version: str) -> str:
    """What an engine is started with is no version that a trainer has sent."""
    return version if version == "default" else ("even", "odd")[int(version) % 2]


def check_tokens(samples: list[Sample], models: dict[str, Any]) -> None:
    """Each token has the log-prob that the weights of its version give it."""
    for sample in samples:
        first = len(sample.tokens) - sample.response_length - 1
        by_version = {
            version: token_logprobs(models[weights_of(version)][1], sample.tokens)[first:]
            for version, _ in sample.version_spans
        }
        expected = [by_version[version][i] for i, version in enumerate(sample.token_versions)]
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-4)


class Rollouts:
    """Calls the manager and keeps what it was given."""

    def __init__(self, manager: RolloutManager, models: dict[str, Any], monkeypatch: Any) -> None:
        self.manager, self.models = manager, models
        self.samples: list[Sample] = []
        check = manager._check
        monkeypatch.setattr(
            manager, "_check", lambda origin, found: (check(origin, found), self._keep(found))
        )

    def _keep(self, samples: list[Sample]) -> None:
        assert len(samples) == BATCH * SAMPLES
        check_tokens(samples, self.models)
        self.samples += samples

    @property
    def groups(self) -> list[int]:
        return [sample.group_index or 0 for sample in self.samples[::SAMPLES]]

    def check_books(self, fates: set[str]) -> None:
        """Now, and after a restart; ``fates`` are the reasons for which groups may have been dropped."""
        restarted = RolloutDataSourceWithBuffer(self.manager._config.flat)
        restarted.load(ROLLOUTS - 1)
        for source in (self.manager._data_source, restarted):
            books, waiting = source.ledger, [group[0].group_index for group in all_waiting(source)]
            assert books.balanced and books.leased == 0 and set(books.dropped) <= fates
            assert len(self.groups) == BATCH * ROLLOUTS
            assert len({*self.groups, *waiting}) == len(self.groups) + len(waiting)
            assert books.issued == books.trained + books.dropped.total() + len(waiting)


def all_waiting(source: RolloutDataSourceWithBuffer) -> list[list[Sample]]:
    return [*source._returned, *source.buffer]


def listed(manager: RolloutManager) -> set[str]:
    return {worker["url"] for worker in manager._fleet.models["default"].router.list_workers()}


def living() -> list[ForkedEngine]:
    return [one for one in ForkedEngines.launched if one.process.is_alive()]


def victim_of(blow: Blow) -> ForkedEngine:
    """Waits for it."""
    wait_until(lambda: blow.struck is not None)
    # The last one: the id may have been another one's before.
    return [one for one in ForkedEngines.launched if one.process.pid == blow.struck][-1]


def without_surplus(manager: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout after which nothing waits that is finished: the next one has to ask engines."""
    with monkeypatch.context() as patch:
        patch.setattr(manager._config.flat, "over_sampling_batch_size", BATCH)
        manager.generate(0)


def struck_while_aborting(
    manager: RolloutManager, blow: Blow, signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rollout. Its surplus groups would go on and on: engines are busy when the batch is full."""
    abort, params_of = sglang_rollout.abort, generation.params_for_sample

    async def strike_first(args: Namespace, rollout_id: int) -> list[list[Any]]:
        """Before anybody is told of the abort: streams end by themselves then."""
        blow.order(signum)
        while blow.struck is None:
            await asyncio.sleep(0.01)
        return await abort(args, rollout_id)

    def endless(args: Namespace, params: dict[str, Any], sample: Sample) -> dict[str, Any]:
        surplus = (sample.group_index or 0) >= 2 * BATCH
        more = {"max_new_tokens": ENDLESS, "ignore_eos": True} if surplus else {}
        return params_of(args, params, sample) | more

    with monkeypatch.context() as patch:
        patch.setattr(sglang_rollout, abort.__name__, strike_first)
        patch.setattr(generation, params_of.__name__, endless)
        manager.generate(1)


@SIGNALS
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_lost_engine_costs_no_group_and_its_successor_has_current_weights(
    function: str, signum: int, start: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = start(*FUNCTIONS[function], "--save", tmp_path / "save", "--save-interval", 1)
    trainer, rollouts = Trainer(manager, models), Rollouts(manager, models, monkeypatch)
    trainer.update()
    without_surplus(manager, monkeypatch)
    trainer.update()
    blow = Blow(tmp_path)
    if function.endswith("aborting"):
        struck_while_aborting(manager, blow, signum, monkeypatch)
    else:
        blow.order(signum)
        manager.generate(1)
    victim = victim_of(blow)
    trainer.update()
    assert victim.process.exitcode is not None
    assert listed(manager) == {one.endpoint.url for one in living()}
    assert len(ForkedEngines.launched) == 3
    manager.generate(2)
    stop_worker()
    assert manager._data_source.ledger.trained == BATCH * ROLLOUTS
    rollouts.check_books(MAY_BE_DROPPED.get(function, set()))


@SIGNALS
def test_rejection_sampling_outlives_every_engine_it_began_with(
    signum: int, start: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight update comes for which a successor would have to wait."""
    output = tmp_path / "accepted"
    manager = start(*REJECTION, "--debug-rollout-only", "--rejection-output", output)
    rollouts = Rollouts(manager, models, monkeypatch)
    manager.generate(0)
    for rollout_id in (1, 2):
        blow = Blow(tmp_path)
        blow.order(signum)
        manager.generate(rollout_id)
        victim_of(blow)
        wait_until(lambda launched=2 + rollout_id: len(ForkedEngines.launched) == launched)
        wait_until(lambda: listed(manager) == {one.endpoint.url for one in living()})
    rollouts.check_books({"rejected"})
    rows = [json.loads(line) for file in sorted(output.glob("*.jsonl")) for line in file.open()]
    assert [row["index"] for row in rows] == [
        sample.index for sample in rollouts.samples if sample.reward == 1.0
    ]
