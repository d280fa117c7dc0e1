"""What became of every turn of a run by ``outside_agents.py``: what agents, engines and trainer noted."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.rollout.data_state import read_state, state_path
from slime.utils.types import Sample
from tests.e2e.outside_agents import CONVERSATIONS, Plan

Record = dict[str, Any]


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Evidence:
    """What a run has left.

    Attributes:
        turns, engines, kills, updates: lines, see ``outside_agents.py``.
        steps: the samples of each step, as the trainer got them.
        ledger: the books after the last step.
    """

    plan: Plan
    turns: list[Record]
    engines: list[Record]
    kills: list[Record]
    updates: list[Record]
    steps: list[list[Sample]]
    ledger: dict[str, Any]

    @staticmethod
    def of(directory: Path, steps: int) -> "Evidence":
        files = [directory / "rollouts" / f"{step}.pt" for step in range(steps)]
        saved = [torch.load(file, weights_only=False)["samples"] for file in files]
        lines = [_lines(directory / f"{name}.jsonl") for name in ("turns", "engines", "kills", "updates")]
        return Evidence(
            Plan(**json.loads((directory / "plan.json").read_text())),
            *lines,
            steps=[[Sample.from_dict(sample) for sample in samples] for samples in saved],
            ledger=read_state(state_path(str(directory / "save"), steps - 1))["ledger"],
        )

    @property
    def samples(self) -> list[Sample]:
        return [sample for samples in self.steps for sample in samples]

    def keys(self, event: str) -> list[str]:
        return [turn["key"] for turn in self.turns if turn["event"] == event]


def prove(evidence: Evidence) -> dict[str, Any]:
    """Returns what was counted.

    Raises:
        AssertionError: a turn or a conversation was lost, or is not trained on as engines have recorded it.
    """
    _prove_turns(evidence)
    _prove_ledger(evidence)
    parts = _Parts(evidence)
    found = [parts.of(sample) for sample in evidence.samples]
    told = sum(sample.prefix_cache_info.recomputed_tokens for sample in evidence.samples)
    known = sum(each["recomputed"] for each in found)
    assert known <= told, f"{known} tokens were computed again (wanted: at most the {told} of the metric)"
    rewards = [statistics.fmean(float(sample.reward) for sample in samples) for samples in evidence.steps]
    quarter = max(len(rewards) // 4, 1)
    begins = [update["time"] for update in evidence.updates]
    return {
        "turns": len(evidence.keys("asked")),
        "turns_lost": 0,
        "conversations_trained": len(evidence.samples),
        "updates": len(begins),
        "seconds_between_updates": (begins[-1] - begins[0]) / (len(begins) - 1),
        "kills": len(evidence.kills),
        "kills_in_turns": sum(_is_in_turn(evidence, kill) for kill in evidence.kills),
        "kills_in_updates": sum(kill["where"] == "in an update" for kill in evidence.kills),
        "turns_of_several_versions": sum(each["several_versions"] for each in found),
        "streams_continued_elsewhere": sum(each["continued"] for each in found),
        "requests_asked_anew": sum(record["status"] != 200 for record in evidence.engines),
        "tokens": sum(each["tokens"] for each in found),
        "recomputed_tokens": told,
        "recomputed_beyond_metric": max(known - told, 0),
        "groups": evidence.ledger,
        "reward": {
            "first_quarter": statistics.fmean(rewards[:quarter]),
            "last_quarter": statistics.fmean(rewards[-quarter:]),
        },
    }


def _is_in_turn(evidence: Evidence, kill: Record) -> bool:
    """Whether one was under way: between the word of the agent and the kill it may have ended."""
    before = [turn["event"] for turn in evidence.turns if turn["time"] < kill["time"]]
    return kill["where"] == "in a turn" and before.count("asked") > before.count("answered")


def _prove_turns(evidence: Evidence) -> None:
    """Every turn was answered, and every conversation is trained on, but for those under way at the end."""
    refused = [turn for turn in evidence.turns if turn["event"] == "refused"]
    assert not refused, f"{len(refused)} turns were refused, the first: {refused[0]}"
    trained = [sample.metadata["key"] for sample in evidence.samples]
    assert len(set(trained)) == len(trained) == CONVERSATIONS * len(evidence.steps)
    assert set(trained) <= set(evidence.keys("over"))
    under_way = set(evidence.keys("asked")) - set(trained)
    # As many groups as may run, and as many that are finished and wait.
    assert len(under_way) <= 2 * 2 * CONVERSATIONS, f"{len(under_way)} conversations are not trained on"
    for event in ("asked", "answered"):
        counts = [evidence.keys(event).count(key) for key in trained]
        assert set(counts) == {evidence.plan.turns}, f"turns {event}: {sorted(set(counts))}"


def _prove_ledger(evidence: Evidence) -> None:
    books = evidence.ledger
    assert books["trained"] == len(evidence.steps) and not books["dropped"] and not books["filtered"], books
    assert books["issued"] == books["trained"] + books["buffered"] + books["leased"], books


class _Parts:
    """The requests whose answers trained tokens are made of."""

    def __init__(self, evidence: Evidence) -> None:
        self._turns = evidence.plan.turns
        self._records: dict[tuple[int, ...], list[Record]] = defaultdict(list)
        for record in evidence.engines:
            if record["said"] and record["said"].get("output_token_logprobs"):
                self._records[tuple(record["prompt"])].append(record["said"])

    def of(self, sample: Sample) -> dict[str, int]:
        """Counts, of a sample whose every token is an engine's, with its log-prob and its version."""
        start, turns = len(sample.tokens) - sample.response_length, list(_answers(sample.loss_mask or []))
        assert len(turns) == self._turns, f"{len(turns)} turns are trained on (wanted: {self._turns})"
        versions = sample.token_versions
        counts = dict.fromkeys(("tokens", "continued", "several_versions", "recomputed"), 0)
        for turn in turns:
            parts = self._parts(sample, start, turn.start, turn.stop)
            assert parts, f"no engine has made tokens {turn} of sample {sample.index} as trained on"
            counts["tokens"] += len(turn)
            counts["continued"] += sum(not part.get("finish_reason") for part in parts)
            counts["several_versions"] += len({versions[n] for n in turn}) > 1
            counts["recomputed"] += sum(
                max(part["prompt_tokens"] - part["cached_tokens"] - 1, 0) for part in parts[1:]
            )
        made = [int(versions[n] or -1) for turn in turns for n in turn]
        assert min(made) > 0 and made == sorted(made), f"versions of tokens: {made}"
        return counts

    def _parts(self, sample: Sample, start: int, at: int, end: int) -> list[Record] | None:
        """Answers to one request after the other, each with the tokens of those before it."""
        if at == end:
            return []
        for part in self._records[tuple(sample.tokens[: start + at])]:
            count = len(part["output_token_logprobs"])
            if at + count <= end and _is_there(part, sample, start, at):
                rest = self._parts(sample, start, at + count, end)
                if rest is not None:
                    return [part, *rest]
        return None


def _is_there(part: Record, sample: Sample, start: int, at: int) -> bool:
    """Whether these very tokens are there, with their log-probs and the versions of the weights."""
    made = part["output_token_logprobs"]
    place = slice(at, at + len(made))
    assert sample.rollout_log_probs is not None
    return (
        [triple[1] for triple in made] == sample.tokens[start + at : start + at + len(made)]
        and [triple[0] for triple in made] == sample.rollout_log_probs[place]
        and _versions(part, len(made)) == sample.token_versions[place]
    )


def _versions(part: Record, count: int) -> list[str]:
    spans = part.get("weight_versions")
    if not spans:
        return [part["weight_version"]] * count
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def _answers(mask: Sequence[int]) -> Iterator[range]:
    """The places of tokens that a model made, turn by turn."""
    begin = 0
    for is_answer, tokens in itertools.groupby(mask):
        end = begin + len(list(tokens))
        if is_answer:
            yield range(begin, end)
        begin = end
