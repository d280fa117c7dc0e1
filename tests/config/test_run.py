"""The tree of a run says all that its flat args say, and nothing else."""

import pytest

from slime.config.backend import BackendConfig
from slime.config.fleet import FleetConfig
from slime.config.memory import MemoryConfig
from slime.config.metrics import MetricsConfig
from slime.config.run import RunConfig, filled, options_of, run_config, values_of
from slime.config.server import ServerConfig
from slime.config.tracking import TrackingConfig
from tests.run_args import plugin_args, run_args


@pytest.mark.parametrize(
    "kind", [RunConfig, BackendConfig, FleetConfig, MemoryConfig, MetricsConfig, ServerConfig]
)
def test_a_slice_with_others_has_every_value_of_args(kind):
    args = run_args(eps_clip=0.125)
    vars(args).update(sglang_pp_size=2, optimizer="sgd", model="a user's own")  # as groups are called, too
    config = filled(kind, args)
    assert values_of(config) == vars(args)
    assert config.others["model"] == "a user's own" and config.others["sglang_pp_size"] == 2
    assert "eps_clip" in values_of(config) and values_of(config)["optimizer"] == "sgd"


def test_what_a_group_states_is_no_other():
    config = run_config(run_args(lr=0.5))
    assert values_of(config.optimizer) == {
        name: value for name, value in vars(config.optimizer).items() if name in vars(config.flat)
    }
    assert not config.others.keys() & values_of(config.optimizer).keys()
    assert config.flat.lr == config.optimizer.lr == 0.5


def test_options_of_another_parser_have_its_names():
    args = run_args()
    vars(args).update(sglang_pp_size=2, sglang_api_key="k", router_policy="random", router_cb_window=3)
    config = filled(FleetConfig, args)
    engine, router = options_of(config, "sglang_"), options_of(config, "router_")
    assert (engine["pp_size"], engine["api_key"]) == (2, "k")  # that a group states one makes no difference
    assert (router["policy"], router["cb_window"]) == ("random", 3)
    assert "lr" not in engine and "policy" not in engine


def test_a_plug_in_that_has_few_names_is_told_of_those_alone():
    config = filled(MetricsConfig, plugin_args(use_wandb=True, lr=0.5), thin=True)
    assert values_of(config) == {"use_wandb": True, "lr": 0.5}
    assert config.tracking.use_tensorboard is False
    with pytest.raises(AttributeError):
        filled(TrackingConfig, plugin_args(use_wandb=True))
    with pytest.raises(TypeError, match="no names of args: use_wandd"):
        plugin_args(use_wandd=True)
