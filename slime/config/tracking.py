"""The destinations of metrics."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The destinations of metrics. The JSONL file is always written.

    Attributes:
        wandb_random_suffix: the positive name of a switch that says what is not.
    """

    run_name: str | None = flag(help="name of the run in trackers")
    metrics_file: str | None = flag(
        place=True, help="JSONL file of metrics; default metrics.jsonl in --save, else in outputs/"
    )
    dashboard: bool = flag(
        False,
        help="show the run in a browser of this machine while it lasts; the address is in dashboard.url, "
        "beside the metrics",
    )
    use_wandb: bool = flag(False, help="log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(help="mode; default as wandb chooses")
    wandb_dir: str | None = flag(place=True, help="directory of wandb's local files")
    wandb_key: str | None = flag(help="API key")
    wandb_host: str | None = flag(help="address of a private server")
    wandb_team: str | None = flag(help="team (entity)")
    wandb_group: str | None = flag(help="group of the run")
    wandb_project: str | None = flag(help="project")
    wandb_run_id: str | None = flag(help="id of a run to go on with")
    disable_wandb_random_suffix: bool = flag(
        False, help="no random suffix on the group; sets wandb_random_suffix to False"
    )
    wandb_always_use_train_step: bool = flag(False, help="plot rollout metrics over training steps")
    use_tensorboard: bool = flag(False, help="log to tensorboard")
    tb_project_name: str | None = flag(
        place=True, help="directory of tensorboard files; default tensorboard_log"
    )
    tb_experiment_name: str | None = flag(place=True, help="subdirectory of this run")
    prometheus_port: int | None = flag(
        at_least=1,
        at_most=65535,
        help="port of this machine's loopback at which the driver serves the newest metrics, and those of "
        "engines and routers: /metrics",
    )
    log_multi_turn: bool = flag(
        False, help="log lengths with and without what tools said, and turns: multi_turn/..."
    )
    log_passrate: bool = flag(
        False, help="log pass@k: passrate/pass@k of rollouts, eval/<name>-pass@k of evaluations"
    )
    log_reward_category: str | None = flag(help="count samples by this key of the reward")
    log_correct_samples: bool = flag(
        False, help="log lengths and entropy of samples of reward 1: rollout/correct_..."
    )
    wandb_random_suffix: bool
