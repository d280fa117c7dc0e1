"""What the processes of a run import, and their fork server therefore imports once for all of them."""

from collections.abc import Iterator

from slime.config.fleet import FleetConfig
from slime.config.trainers import trainer_of
from slime.weight_sync.transports import TRANSPORTS


def modules_of(config: FleetConfig) -> Iterator[str]:
    """Names of modules, none of which imports Ray; those that all processes need come first."""
    yield from ("torch", "transformers.models.auto.tokenization_auto")
    # Ray imports these.
    yield from ("google.protobuf.internal", "jsonschema", "msgpack", "psutil", "requests", "yaml")
    yield from ("slime.rollout.data_source", "slime.rollout.sglang_rollout")
    if not config.debug.debug_train_only and config.engines.rollout_engine == "embedded":
        yield from ("slime.backends.embedded_engine.build", "slime.backends.embedded_engine.http.app")
        yield from ("slime.backends.embedded_engine.row_executor", "uvicorn")
    if not config.debug.debug_rollout_only:
        yield from trainer_modules(config)


def trainer_modules(config: FleetConfig) -> Iterator[str]:
    """Names of those that a trainer's rank imports."""
    transports = (path.rpartition(".")[0] for path in TRANSPORTS.values())
    yield from ("slime.training.trainer", "slime.weight_sync.update", *transports)
    yield from trainer_of(config.trainer).imports
