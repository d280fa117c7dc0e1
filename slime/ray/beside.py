"""Where evaluations beside training are answered."""

from dataclasses import dataclass

from slime.arguments.core.run_args import copied
from slime.config.run import RunConfig, run_config
from slime.config.served_models import DEFAULT
from slime.ray.served_model import ServedModel


@dataclass(frozen=True)
class Beside:
    """The model of ``--eval-model`` as it is now.

    Attributes:
        config: for an evaluation: the model is the first one in it, whom everything asks.
        version: of its weights; None before the first.
        engines: URLs of its living engines.
    """

    config: RunConfig
    version: str | None
    engines: list[str]


def beside(config: RunConfig, model: ServedModel) -> Beside:
    """What an evaluation needs to know of the model that answers it.

    Args:
        config: with addresses.
    """
    return Beside(config_beside(config, model.name), model.version, [engine.url for engine in model.living])


def config_beside(config: RunConfig, name: str) -> RunConfig:
    """The configuration with a served model in the place of the first one, so that user code asks it, too."""
    models, routers = config.engines.served_models, config.router.sglang_model_routers
    host, port = routers[name]
    own = copied(
        config.flat,
        sglang_router_ip=host,
        sglang_router_port=port,
        sglang_model_routers={**routers, models[0].name: routers[name], DEFAULT: routers[name]},
        rollout_num_engines=next(model.num_engines for model in models if model.name == name),
    )
    return run_config(own)
