"""Recorded rollouts of a run, a step at a time.

    recordings = Recordings(["run/rollout_data/{rollout_id}.pt"], ["run/train_data/{rollout_id}.pt"])
    recordings.steps()           # from the names of files; none is opened
    recordings.samples(3)        # of rollout 3
    recordings.sample(3, 0)      # its first one, token by token

Files may be of anybody: torch makes nothing but plain data and tensors of them, one that is too large is not
read, and no structure of theirs is walked through beyond what a sample has.
"""

import glob
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from slime.dashboard.token_texts import TokenTexts

if TYPE_CHECKING:  # a page without samples is there sooner without numpy
    from slime.dashboard.samples import Recorded

LARGEST_PICKLE = 128 * 2**20
"""Bytes of lists and texts in a file; in memory they take about ten times that while they are read."""
LARGEST_FILE = 4 * 2**30
"""Bytes of a file with its tensors, which are read as they are needed."""
LISTED = 200
"""Steps that are listed, and samples of one."""
WINDOW = 2000
"""Tokens that are shown at once."""
_KEPT = 2  # files, of which what is shown is kept
_FIELD = re.compile(r"\{rollout_id(?::0?\d*d?)?\}")


class RecordingError(Exception):
    """A recording that cannot be shown."""


def files_of(template: str) -> dict[int, Path]:
    """Returns the files that a template with ``{rollout_id}`` in it has by now, by their rollouts."""
    parts = _FIELD.split(template)
    if len(parts) == 1:
        return {}
    name = re.compile(r"(\d{1,9})".join(map(re.escape, parts)))
    found = ((name.fullmatch(path), path) for path in glob.iglob("*".join(map(glob.escape, parts))))
    return {int(match[1]): Path(path) for match, path in found if match}


@dataclass
class Recordings:
    """What a run has recorded; nothing, where it was not told to.

    Attributes:
        rollouts, trained: templates of ``--save-debug-rollout-data`` and ``--save-debug-train-data``; of
            several the first that has files.
        texts: of tokens.
    """

    rollouts: Sequence[str] = ()
    trained: Sequence[str] = ()
    texts: TokenTexts = field(default_factory=TokenTexts)
    _read: OrderedDict[Path, tuple[tuple[int, int], Any]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def steps(self) -> dict[str, Any]:
        """Returns how many steps are recorded, and the last of them."""
        steps = sorted(_first_that_is_there(self.rollouts))
        return {
            "count": len(steps),
            "steps": steps[-LISTED:],
            "trained": bool(_first_that_is_there(self.trained)),
        }

    def samples(self, step: int, start: int = 0) -> dict[str, Any]:
        """Returns what a line says of each sample of a step, `LISTED` at most.

        Raises:
            RecordingError: it is not there, or cannot be shown.
        """
        found = self._recorded(step)
        listed = [sample.line(start + number) for number, sample in enumerate(found[start : start + LISTED])]
        return {"count": len(found), "start": start, "samples": listed}

    def sample(self, step: int, number: int, start: int = 0) -> dict[str, Any]:
        """Returns a sample with `WINDOW` of its tokens from ``start`` on, and what is known of each.

        Raises:
            RecordingError: it is not there, or cannot be shown.
        """
        found = self._recorded(step)
        if number >= len(found):
            raise RecordingError(f"sample {number}: rollout {step} has {len(found)}")
        sample, end = found[number], start + WINDOW
        values = sample.values() | self._after(step, sample)
        ids = [int(token) for token in sample.tokens[start:end]]
        return {
            **sample.whole(number),
            "start": start,
            "ids": ids,
            "texts": self.texts.of(ids),
            "values": {name: sample.windowed(column, start, end) for name, column in values.items()},
        }

    def _recorded(self, step: int) -> "list[Recorded]":
        from slime.dashboard.samples import recorded

        path = _first_that_is_there(self.rollouts).get(step)
        if path is None:
            raise RecordingError(f"rollout {step}: no recording of it")
        return self._of(path, recorded)

    def _after(self, step: int, sample: "Recorded") -> dict[str, Any]:
        """What training made of the sample, if that was recorded; ``gap`` is trainer minus engine.

        The change by the step is positive where the token has become more probable.
        """
        from slime.dashboard.samples import AFTER, BEFORE, Trained, trained

        path = _first_that_is_there(self.trained).get(step)
        of_step: Trained = self._of(path, trained) if path else Trained()
        values = of_step.values(sample)
        if "log-prob, trainer" in values and sample.log_probs is not None:
            values["gap"] = values["log-prob, trainer"] - sample.log_probs
        if BEFORE in values and AFTER in values:
            values["change by the step"] = values[AFTER] - values[BEFORE]
        return values

    def _of(self, path: Path, read: Callable[[Any], Any]) -> Any:
        """What was made of a file, which is read again once it has changed."""
        with self._lock:
            try:
                status = path.stat()
                stamp = status.st_mtime_ns, status.st_size
                if path not in self._read or self._read[path][0] != stamp:
                    self._read[path] = stamp, read(load(path))
            except RecordingError:
                raise
            except Exception as error:  # files of others may hold anything
                raise RecordingError(f"{path}: {type(error).__name__}: {error}"[:300]) from error
            self._read.move_to_end(path)
            while len(self._read) > _KEPT:
                self._read.popitem(last=False)
            return self._read[path][1]


def load(path: Path) -> Any:
    """Returns the content of a torch file: plain data, tensors and numpy's types, as they are in it.

    Raises:
        RecordingError: it is too large.
        pickle.UnpicklingError: it holds something else, which is not made.
    """
    with zipfile.ZipFile(path) as file:
        sizes = {entry.filename: entry.file_size for entry in file.infolist()}
    pickled = sum(size for name, size in sizes.items() if name.endswith("/data.pkl"))
    for what, size, most in (
        ("lists and texts", pickled, LARGEST_PICKLE),
        ("data", sum(sizes.values()), LARGEST_FILE),
    ):
        if size > most:
            raise RecordingError(
                f"{path}: {size / 2**20:.0f} MiB of {what} (shown: up to {most / 2**20:.0f})"
            )
    from slime.utils.numpy_data import load_as_it_is  # brings torch, which a page without samples spares

    return load_as_it_is(path)


def _first_that_is_there(templates: Sequence[str]) -> dict[int, Path]:
    return next((found for template in templates if (found := files_of(template))), {})
