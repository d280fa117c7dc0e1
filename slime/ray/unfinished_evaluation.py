"""Which evaluation beside training was under way when a run ended: told in a file beside its checkpoints."""

import json
import logging
import os
from pathlib import Path

from slime.config.checkpoints import CheckpointConfig

logger = logging.getLogger(__name__)
_NAME = "unfinished_evaluation.json"


class UnfinishedEvaluation:
    """Keeps the number of the one that is under way.

    Args:
        config: None where nothing is kept.
    """

    def __init__(self, config: CheckpointConfig | None) -> None:
        self._own = Path(config.save) / _NAME if config and config.save else None
        self._earlier = Path(config.load) / _NAME if config and config.load else None

    def found(self) -> int | None:
        """The one that the run which is resumed had not finished; None if there is none."""
        if self._earlier is None or not self._earlier.is_file():
            return None
        return int(json.loads(self._earlier.read_text())["rollout"])

    def begin(self, rollout_id: int) -> None:
        if self._own is not None:
            partial = self._own.with_suffix(".partial")
            try:
                partial.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps({"rollout": rollout_id}))
                os.replace(partial, self._own)
            except OSError as error:  # a resumed run will not tell of it
                logger.warning("%s could not be written: %s", self._own, error)

    def end(self) -> None:
        if self._own is not None:
            self._own.unlink(missing_ok=True)
