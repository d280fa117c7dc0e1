"""A rollout function that replays recordings while the engines stay up.

``--rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data FILE``. Unlike
``--load-debug-rollout-data``, which starts no engines, the whole loop runs: offload, training, weight sync.
"""

from string import Formatter
from typing import Any

from slime.config.debug import DebugConfig
from slime.config.rewards import RewardConfig
from slime.config.run import filled
from slime.observability.rollout_data_utils import read_recording, recording_path
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.evaluation import reward_number
from slime.utils.types import Sample

EVAL_NAME = "forge_eval"


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The samples of a recording; with ``{rollout_id}`` in its name, of that rollout, or else of rollout 0.

    An evaluation replays the recording of one, ``eval_<id>``, as dataset ``forge_eval``.

    Raises:
        RolloutError: there is no such recording.
    """
    template = filled(DebugConfig, args).load_forge_rollout_data
    if template is None:
        raise RolloutError("--load-forge-rollout-data: missing (wanted: the recording to replay)")
    if evaluation:
        return _evaluation(filled(RewardConfig, args), template, rollout_id)
    candidates = [rollout_id, 0] if has_rollout_id(template) else [rollout_id]
    return RolloutFnTrainOutput(_first_of(template, candidates, evaluation=False))


def _evaluation(config: RewardConfig, template: str, rollout_id: int) -> RolloutFnEvalOutput:
    if not has_rollout_id(template):
        raise RolloutError(
            f"--load-forge-rollout-data {template}: cannot evaluate from one file (wanted: {{rollout_id}} in "
            "its name, or an --eval-function-path)"
        )
    samples = _first_of(template, [rollout_id], evaluation=True)
    return RolloutFnEvalOutput(
        {
            EVAL_NAME: {
                "rewards": [reward_number(config, sample) for sample in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        }
    )


def has_rollout_id(template: str) -> bool:
    return any(field == "rollout_id" for _, field, _, _ in Formatter().parse(template))


def _first_of(template: str, rollout_ids: list[int], *, evaluation: bool) -> list[Sample]:
    paths = [recording_path(template, rollout_id, evaluation=evaluation) for rollout_id in rollout_ids]
    for path in paths:
        if path.is_file():
            return [_replayed(sample) for sample in read_recording(path, "--load-forge-rollout-data")]
    tried = " or ".join(map(str, dict.fromkeys(paths)))
    raise RolloutError(f"--load-forge-rollout-data {template}: no recording at {tried}")


def _replayed(sample: Sample) -> Sample:
    """Drops the versions of a sample's weights, which are those of another run."""
    sample.weight_versions, sample.version_spans = [], []
    return sample
