"""What is held against a launcher and against an example; each check returns what is wrong."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.arguments.original_scripts import value_of
from tests.engines.embedded import token_logprobs
from tests.original.example_run import Outcome, rollout_words, run_example
from tests.original.parsed import Question, refusals
from tests.original.places import placed, row_of, write_places, write_rows
from tests.original.recording import Launch, LauncherFailed, of_bash, of_python
from tests.original.repository import copy_of, helpers_of_tests, third_parties

CLOSE = 1e-4  # of float32 in another order of sums
_OF_THE_USER_S = {
    *("--custom-generate-function-path", "--custom-rm-path", "--rollout-function-path"),
    *("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"),
}


@dataclass
class Workplace:
    """A copy of a repository, and what its launchers are given.

    Attributes:
        tokenizer_of: a directory whose tokenizer models get.
        root: where everything is written.
    """

    original: Path
    tokenizer_of: Path
    root: Path
    _number: Iterator[int] = field(default_factory=itertools.count)
    _recorded: dict[str, list[Launch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copy = copy_of(self.original, self.root / "copy")
        self.stand_ins = third_parties(self.copy)
        self.helpers = helpers_of_tests(self.original)

    def scratch(self) -> Path:
        path = self.root / f"scratch-{next(self._number)}"
        path.mkdir()
        return path

    def launches(self, script: str) -> list[Launch]:
        """The trainings that a launcher starts.

        Raises:
            LauncherFailed: it starts none.
        """
        if script not in self._recorded:
            of = of_python if script.endswith(".py") else of_bash
            self._recorded[script] = of(self.copy, script, self.scratch())
        return self._recorded[script]

    def question(self, launch: Launch, words: list[str], stand_ins: Iterable[str]) -> Question:
        import_path = [*launch.import_path, str(self.copy)]
        return Question(words, import_path, [*stand_ins], self.helpers)


def refused(place: Workplace, script: str, given: Iterable[str] = ()) -> list[str]:
    """What our parser refuses of a launcher's command lines.

    Args:
        given: flags that the docs add to it.
    """
    found = []
    for launch in place.launches(script):
        root = place.scratch()
        words = [*placed(launch, root, place.copy), *given]
        words = write_places(launch, words, root, place.tokenizer_of, place.root / "weights")
        found += refusals(place.question(launch, words, place.stand_ins), place.copy)
    return found


def wrong_with_launcher(
    place: Workplace, script: str, expected: Iterable[str], given: Iterable[str] = ()
) -> str | None:
    """How what refuses a launcher differs from the flags that the docs name."""
    try:
        found = refused(place, script, given)
    except LauncherFailed as error:
        return str(error)
    flags = {message.split()[0].rstrip(":,") for message in found}
    if flags == set(expected):
        return None
    return f"{script}: refused for {sorted(flags)}, the docs say {sorted(expected)}: {found}"


def has_code_of_its_own(launch: Launch) -> bool:
    """Whether it names functions that make or judge samples."""
    return bool(_OF_THE_USER_S & set(launch.words))


def run_launch(place: Workplace, launch: Launch, engine: str) -> Outcome:
    """A rollout of an example, with the model that is served."""
    data = place.scratch() / "data.jsonl"
    write_rows(data, row_of(launch.words))
    words = rollout_words(launch.words, place.tokenizer_of, data, engine)
    return run_example(place.question(launch, words, ()), place.copy, engine)


def wrong_with_outcome(outcome: Outcome, model: Any, temperature: float = 1.0) -> str | None:
    """What is wrong with samples: each is trained on tokens, and these have the model's log-probs."""
    if outcome.error:
        return outcome.error
    if not outcome.samples:
        return "no samples"
    complaints = (_wrong_with_sample(sample, model, temperature) for sample in outcome.samples)
    return next(filter(None, complaints), None)


def _wrong_with_sample(sample: dict[str, Any], model: Any, temperature: float) -> str | None:
    tokens, length = sample["tokens"], sample["response_length"]
    mask = sample["loss_mask"] or [1] * length
    if not 0 < length < len(tokens) or len(mask) != length:
        return f"sample {sample['index']}: {len(tokens)} tokens, response {length}, mask {len(mask)}"
    if not any(mask):
        return f"sample {sample['index']}: no token of its {length} is trained on"
    if sample["reward"] is None:
        return f"sample {sample['index']}: no reward"
    wanted = token_logprobs(model, tokens, temperature)[-length:]
    for told in (sample["rollout_log_probs"], sample["teacher_log_probs"]):
        pairs = zip(told or (), wanted, mask, strict=False)
        gap = max((abs(mine - right) for mine, right, trained in pairs if trained), default=0.0)
        if gap > CLOSE:
            return f"sample {sample['index']}: log-probs are {gap:.2g} off"
    return None


def temperature_of(launch: Launch) -> float:
    flag = "--rollout-temperature"
    return float(value_of(launch.words, flag)) if flag in launch.words else 1.0
