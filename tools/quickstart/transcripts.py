"""What the model wrote, from the recordings of the RL phase."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer

TOOL_CALL = "<tool_call>"
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
TOOL_RESPONSE = re.compile(r"<tool_response>(.*)</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """One message; ``speaker`` is user, assistant or calculator."""

    speaker: str
    text: str


@dataclass(frozen=True)
class Transcript:
    """One answer to one problem."""

    turns: Sequence[Turn]
    label: str
    reward: float
    dataset: str | None

    @property
    def question(self) -> str:
        return self.turns[0].text

    @property
    def used_tool(self) -> bool:
        return any(turn.speaker == "assistant" and TOOL_CALL in turn.text for turn in self.turns)


def read_recording(path: Path, tokenizer: Tokenizer) -> list[Transcript]:
    """The samples of one recorded rollout or evaluation, in their order."""
    recording = torch.load(path, weights_only=True)
    return [
        Transcript(
            turns=parse_turns(tokenizer.decode(sample["tokens"], skip_special_tokens=False)),
            label=str(sample["label"]),
            reward=float(sample["reward"]),
            dataset=sample["metadata"].get("dataset"),
        )
        for sample in recording["samples"]
    ]


@cache
def load_tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def parse_turns(text: str) -> list[Turn]:
    """The messages of a conversation in ChatML. A tool's answer is a user turn inside tool_response marks."""
    turns = []
    for speaker, content in TURN.findall(text):
        if speaker == "user" and (answer := TOOL_RESPONSE.fullmatch(content)):
            turns.append(Turn("calculator", answer.group(1)))
        else:
            turns.append(Turn(speaker, content))
    return turns


def tool_share(transcripts: Sequence[Transcript]) -> float:
    """The share of answers that called the tool."""
    return sum(transcript.used_tool for transcript in transcripts) / len(transcripts)


def pick_pairs(
    before: Sequence[Transcript], after: Sequence[Transcript], count: int = 4
) -> list[tuple[Transcript, Transcript]]:
    """Answers to the same questions before and after training, for the report.

    By position, not by beauty: the first that turned from wrong to right, then the first that was right
    all along, then the first that is still wrong, then more that turned.
    """
    later = {transcript.question: transcript for transcript in after}
    pairs = [(first, later[first.question]) for first in before if first.question in later]
    turned = [pair for pair in pairs if pair[0].reward == 0 and pair[1].reward > 0]
    kept = [pair for pair in pairs if pair[0].reward > 0 and pair[1].reward > 0]
    failed = [pair for pair in pairs if pair[1].reward == 0]
    return (turned[:1] + kept[:1] + failed[:1] + turned[1:])[:count]
