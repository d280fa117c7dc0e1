"""Where the quickstart keeps its files."""

from dataclasses import dataclass
from pathlib import Path

# 500 optimizer steps of 64 conversations; scripts/quickstart/sft.sh reads 640 per rollout.
NUM_SFT_ROLLOUTS, SFT_STEPS_PER_ROLLOUT = 50, 10
NUM_RL_ROLLOUTS = 20
SAMPLED, GREEDY = "sampled", "greedy"


@dataclass(frozen=True)
class Layout:
    """Paths below the output directory. The shell scripts of the phases use the same names."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def initial_model(self) -> Path:
        return self.root / "model-initial"

    @property
    def sft_model(self) -> Path:
        return self.root / "model-sft"

    @property
    def rl_model(self) -> Path:
        return self.root / "model-rl"

    @property
    def sft_metrics(self) -> Path:
        return self.root / "sft" / "metrics.jsonl"

    @property
    def rl_metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def recordings(self) -> Path:
        return self.root / "recordings"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"
