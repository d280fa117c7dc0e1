"""``python -m tests.original.example_run FILE URL``: one rollout of an example, against an engine.

A process of its own, for the import path. The command line is the launcher's own, but for the sizes and what
only a trainer reads: the model is a tiny random one that an embedded engine serves.
"""

import json
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.arguments import UsageError, validated_args
from slime.rollout.base_types import call_rollout_fn
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function
from tests.original.parsed import Question, answer, asked, prepare

GROUPS, OF_A_GROUP = 2, 2
_KEPT = {
    *("--input-key", "--label-key", "--metadata-key", "--tool-key", "--apply-chat-template"),
    *(
        "--apply-chat-template-kwargs",
        "--rm-type",
        "--reward-key",
        "--eval-reward-key",
        "--rm-url",
        "--group-rm",
    ),
    *("--custom-generate-function-path", "--custom-rm-path", "--custom-reward-post-process-path"),
    *("--custom-config-path", "--rollout-function-path", "--data-source-path", "--rollout-sample-hook-path"),
    *("--custom-convert-samples-to-train-data-path", "--rollout-stop", "--rollout-stop-token-ids"),
    *("--rollout-skip-special-tokens", "--partial-rollout", "--loss-type", "--loss-mask-type"),
    *("--use-opd", "--opd-type", "--rollout-temperature", "--advantage-estimator"),
}


@dataclass(frozen=True)
class Outcome:
    """What a rollout came to.

    Attributes:
        samples: ``Sample.to_dict`` of each that would be trained, in the order of the rollout.
        missing: a package that the example imports and this machine lacks.
        error: the traceback of whatever else ended it.
    """

    samples: list[dict[str, Any]]
    missing: str | None = None
    error: str | None = None


def run_example(question: Question, directory: Path, engine: str) -> Outcome:
    """One rollout of the example whose launcher has these words; ``engine`` is the engine's address."""
    try:
        return Outcome(**answer("tests.original.example_run", question, [engine], directory))
    except RuntimeError as error:
        return Outcome([], error=str(error))


def rollout_words(words: list[str], model: Path, data: Path, engine: str) -> list[str]:
    """The words that say how samples are made, and small sizes."""
    kept = [word for group in _flags(words) if group[0] in _KEPT for word in group]
    for place, word in enumerate(kept):
        if word == "--rm-url":
            kept[place + 1] = f"{engine}/generate"  # whatever else answers there, a tiny model can be asked
    sizes = {
        **{"--num-rollout": 1, "--rollout-batch-size": GROUPS, "--n-samples-per-prompt": OF_A_GROUP},
        **{"--rollout-max-response-len": 48, "--actor-num-gpus-per-node": 1, "--rollout-num-gpus": 1},
    }
    own = ["--hf-checkpoint", str(model), "--prompt-data", str(data)]
    return [*kept, *own, *(str(word) for pair in sizes.items() for word in pair)]


def _flags(words: list[str]) -> Iterator[list[str]]:
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    yield group


def _args(words: list[str], engine: str) -> Namespace:
    args = validated_args(words)
    address = urlsplit(engine)
    args.sglang_router_ip, args.sglang_router_port = address.hostname, address.port
    init_http_client(args)
    return args


def _outcome(words: list[str], engine: str) -> Outcome:
    try:
        args = _args(words, engine)
        source = load_function(args.data_source_path)(args)
        output = call_rollout_fn(load_function(args.rollout_function_path), args, 0, source, evaluation=False)
        if args.custom_reward_post_process_path:
            load_function(args.custom_reward_post_process_path)(args, list(_flat(output.samples)))
        return Outcome([_plain(sample.to_dict()) for sample in _flat(output.samples)])
    except (Exception, UsageError) as error:
        missing = _missing(error)
        return Outcome([], missing=missing, error=None if missing else traceback.format_exc())


def _missing(error: BaseException) -> str | None:
    """The package that an import did not find, if it is nobody's here."""
    found = re.search(r"No module named '(\w+)", str(error))
    return found[1] if found and found[1] not in ("slime", "slime_plugins", "examples") else None


def _flat(samples: Any) -> Iterator[Any]:
    if isinstance(samples, list):
        for each in samples:
            yield from _flat(each)
    else:
        yield samples


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "teacher_log_probs",
        "reward",
        "status",
    )
    return {name: entry.get(name) for name in (*kept, "index", "remove_sample")}


def main() -> None:
    question = asked()
    prepare(question)
    told = json.dumps(asdict(_outcome(question.words, sys.argv[2])), default=str)
    print(f"\n{told}", flush=True)


if __name__ == "__main__":
    main()
