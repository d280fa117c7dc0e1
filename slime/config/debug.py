"""One half of the loop alone, what passes between the halves, and the self-checks of a run."""

from dataclasses import dataclass

from slime.config.flag import flag, refused


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Run one half of the loop, dump and reload what passes between the halves."""

    debug_rollout_only: bool = flag(False, help="engines only, no trainer")
    debug_train_only: bool = flag(False, help="trainer only, on --load-debug-rollout-data")
    load_debug_rollout_data: str | None = flag(
        place=True, help="dump to train on, with {rollout_id} in its name"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        above=0, at_most=1, help="part of the dump to use, between 0 and 1"
    )
    save_debug_rollout_data: str | None = flag(
        place=True, help="file to dump samples to, with {rollout_id} in its name"
    )
    save_debug_train_data: str | None = flag(
        place=True, help="file to dump train data to, with {rollout_id} in its name"
    )
    save_debug_log_probs: bool = flag(
        False,
        help="dump log-probs before and after the optimizer steps with train data: 2 more forward passes",
    )
    dump_details: str | None = flag(place=True, help="directory of both dumps")
    trace: str | None = flag(
        place=True, help="file of what each process did when, for Perfetto or chrome://tracing"
    )
    otlp_endpoint: str | None = flag(
        help="OpenTelemetry collector that is sent the same over HTTP, as http://127.0.0.1:4318; keys for it "
        "are in OTEL_EXPORTER_OTLP_HEADERS"
    )
    load_forge_rollout_data: str | None = flag(
        place=True, help="dump that slime.rollout.forge_load replays; {rollout_id} in its name is optional"
    )

    @property
    def collects_spans(self) -> bool:
        """Whether somebody wants to know what each process and sample did when."""
        return self.trace is not None or self.otlp_endpoint is not None


@dataclass(frozen=True, kw_only=True)
class CiConfig:
    """Self-checks of a run."""

    ci_test: bool = flag(
        False,
        help="stop the run when trainer and engine disagree, a rollout's first step is not on policy, or a "
        "metric that shows it is missing",
    )
    ci_disable_kl_checker: bool = flag(False, help="leave out the checks on KL")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, above=0, help="largest mean gap between trainer and engine log-probs"
    )
    ci_save_grad_norm: str | None = refused(help="file to save gradient norms to")
    ci_load_grad_norm: str | None = refused(help="file of gradient norms to compare with")
