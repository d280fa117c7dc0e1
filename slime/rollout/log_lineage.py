"""Which answers of a token log a run may go on with that has gone back to a checkpoint.

A version of the weights says which they are within a run that only goes forward. One that goes back to the
checkpoint of a rollout takes other steps from there, or the same ones again: what newer weights made is of a
past that it does not have. The log therefore has a file that says which version each rollout began with::

    lineage = Lineage(directory)
    lineage.begin(7, version=8, save="/run/checkpoints")
    lineage.newest(6, load="/run/checkpoints")     # 8: rollout 7 goes on from the checkpoint of rollout 6
    within(answer, newest=8, oldest=6)             # as much of it as those weights made
"""

import json
import os
from dataclasses import replace
from pathlib import Path

from slime.rollout.token_log import LoggedAnswer

_KEPT = 1000  # rollouts: no checkpoint that a run goes back to is older


class Lineage:
    """The versions with which the latest rollouts of a run began."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "rollouts.json"

    def begin(self, rollout_id: int, version: int, save: str | None) -> None:
        """Notes that a rollout begins, and forgets those after it.

        Args:
            save: where the run's checkpoints are.
        """
        began = {number: v for number, v in self._began(save).items() if number < rollout_id}
        began = dict(sorted((began | {rollout_id: version}).items())[-_KEPT:])
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"save": save, "began": began}))
        os.replace(partial, self._path)

    def newest(self, rollout_id: int, load: str | None) -> int | None:
        """The newest version that a run knows which goes on after a rollout; None if that is not known.

        It is that with which the rollout after it began: the weights of its checkpoint, or older ones.
        """
        known = [(number, v) for number, v in self._began(load).items() if number <= rollout_id + 1]
        return max(known)[1] if known else None

    def _began(self, save: str | None) -> dict[int, int]:
        """Returns the version of each rollout; nothing of another run, or where the file is damaged."""
        try:
            found = json.loads(self._path.read_text())
            same = save is not None and found["save"] is not None and _place(found["save"]) == _place(save)
            return {int(number): version for number, version in found["began"].items()} if same else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _place(path: str) -> Path:
    return Path(path).resolve()


def within(answer: LoggedAnswer, newest: int, oldest: int | None) -> LoggedAnswer | None:
    """Returns as much of an answer as weights up to ``newest`` have made; None if that is nothing.

    Args:
        oldest: nothing is left of an answer of which older weights made a part.
    """
    known = 0
    spans = []
    for version, count in answer.spans:
        if version is not None and not (version.isdecimal() and int(version) <= newest):
            break
        if version is not None and oldest is not None and int(version) < oldest:
            return None
        known += count
        spans.append((version, count))
    if known == len(answer.tokens):
        return answer
    if not known:
        return None
    return replace(
        answer,
        status="aborted",
        tokens=answer.tokens[:known],
        log_probs=answer.log_probs[:known],
        loss_mask=answer.loss_mask[:known],
        spans=spans,
        versions=[version for version in answer.versions if version.isdecimal() and int(version) <= newest],
        response=None,
    )
