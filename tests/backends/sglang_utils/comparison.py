"""The embedded engine beside SGLang, request by request: what both say, and where they may differ.

``conformance.yaml`` is the one list of requests and of allowed differences, ``sglang_answers.json`` what
SGLang 0.5.23 answered on a CPU. After a change of the requests, with a server of `make_checkpoint`'s model:

    python -m tests.backends.sglang_utils.comparison http://127.0.0.1:30000

asks it the new ones and writes its answers.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import yaml

HERE = Path(__file__).parent
LIST = HERE / "conformance.yaml"
ANSWERS = HERE / "sglang_answers.json"
ABSENT = "absent"
ANY = "any"
Answer = dict[str, Any]
"""What an answer says: path to value, its status under ``status``."""

_WORDS = ("message", "error", "detail")
_CHANGING = ("id", "created", "e2e_latency", "response_sent_to_client_ts", "rid", "model_path", "root")
"""Names of texts that each server words its own way, and of what no two answers have in common."""
_OF_THE_CACHE = "cached_tokens"  # depends on what was asked before


@dataclass(frozen=True)
class Request:
    """A request, and in what the answers to it may differ.

    Attributes:
        id: by which answers are recorded.
        endpoint: the path, after ``GET`` or another method if it is not ``POST``.
        request: the JSON body.
        raw: the body as it is, in place of JSON.
        headers: beside the usual ones.
        shape: whether the names in the answer count alone, and not the values.
        kills: SGLang's scheduler ends with it; it is never sent there.
        differs: pattern of paths to what the embedded engine says there, `ABSENT` or `ANY`.
        about: the request in the words of the page; requests without a difference are not on it.
        sglang: what it does.
        embedded: what the embedded engine does.
        why: the reason of the difference.
    """

    id: str
    endpoint: str = "/generate"
    request: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    shape: bool = False
    kills: bool = False
    differs: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    sglang: str = ""
    embedded: str = ""
    why: str = ""


@dataclass(frozen=True)
class Note:
    """A difference that no single request shows: another test holds it, or it was read off the code."""

    id: str
    about: str
    sglang: str
    embedded: str
    why: str
    held: str = ""


def read_list() -> tuple[list[Request], list[Note]]:
    """The requests, and the differences without one."""
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    requests = [Request(**entry) for entry in listed["requests"]]
    notes = [Note(**entry) for entry in listed["beyond_requests"]]
    ids = [entry.id for entry in (*requests, *notes)]
    assert len(ids) == len(set(ids)), "two entries have one id"
    return requests, notes


def read_answers() -> dict[str, Answer]:
    """SGLang's answers by the id of the request."""
    answers: dict[str, Answer] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return answers


def client(url: str) -> httpx.Client:
    """Makes a client with a connection for each request: SGLang closes that of an answer 500."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=600, limits=limits, trust_env=False)


def ask(http: httpx.Client, asked: Request) -> Answer:
    """Sends a request; what the answer says."""
    method, _, path = asked.endpoint.rpartition(" ")
    method = method or "POST"
    headers = {"content-type": "application/json", **asked.headers}
    body = asked.raw if asked.raw is not None else json.dumps(asked.request)
    answer = http.request(method, path, content=None if method == "GET" else body, headers=headers)
    said = {"status": answer.status_code}
    for path, value in _flat(_content(answer), ""):
        name = _without_indices(path) if asked.shape else path
        if _OF_THE_CACHE not in path:
            said[name if name != "status" else "body.status"] = _stable(name, value, asked.shape)
    return said


def _content(answer: httpx.Response) -> Any:
    """The body; of a stream what its events say together, however many they are."""
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        return _joined([json.loads(line) for line in lines if line != "[DONE]"], lines[-1] == "[DONE]")
    return answer.json() if kind == "application/json" else kind or None


def _joined(events: Sequence[dict[str, Any]], done: bool) -> dict[str, Any]:
    """Every name that an event has; the texts and the number of log-probs; the last event of `/generate`."""
    leaves = [leaf for event in events for leaf in _flat(event, "")]
    # Which chunks have empty places for what others bring depends on how tokens were joined.
    names = {_without_indices(path) for path, value in leaves if value is not None or "choices" not in path}
    found: dict[str, Any] = {"done": done, "names": dict.fromkeys(sorted(names), True)}
    choices = [choice for event in events for choice in event.get("choices", ())]
    if not choices:
        return found | {"last": events[-1]}
    texts = (choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    rows = [choice.get("logprobs") or {} for choice in choices]
    found["log-probs"] = sum(len(row.get("content") or row.get("tokens") or ()) for row in rows)
    found["reasons"] = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return found | {"text": "".join(texts)}


def _without_indices(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdecimal() and part != "#")


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        yield f"{path}.#" if path else "#", len(value)
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}.{index}" if path else str(index))
    else:
        yield path or "body", value


def _stable(path: str, value: Any, shape: bool) -> Any:
    """A value that is the same in each run: times and log-probs are but numbers."""
    last = path.rpartition(".")[2]
    if isinstance(value, float):
        return "number"
    if shape or last in _CHANGING or (isinstance(value, str) and last in _WORDS):
        return {str: "text", int: "number"}.get(type(value), value)
    return value


def differences(found: Answer, recorded: Answer) -> dict[str, Any]:
    """Path to what was found there, where it is not what was recorded; of another status nothing else."""
    if found["status"] != recorded["status"]:
        return {"status": found["status"]}
    paths = dict.fromkeys((*recorded, *found))
    told = {path: (found.get(path, ABSENT), recorded.get(path, ABSENT)) for path in paths}
    return {path: ours for path, (ours, theirs) in told.items() if ours != theirs}


def unexplained(found: Mapping[str, Any], allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Differences that the list does not have."""
    return {
        path: value
        for path, value in found.items()
        if not any(
            fnmatchcase(path, pattern) and wanted in (value, ANY) for pattern, wanted in allowed.items()
        )
    }


def gone(found: Mapping[str, Any], allowed: Mapping[str, Any]) -> list[str]:
    """Patterns of the list that no difference bears out any more."""
    return [
        pattern
        for pattern, wanted in allowed.items()
        if not any(fnmatchcase(path, pattern) and wanted in (value, ANY) for path, value in found.items())
    ]


def main() -> None:
    """Asks SGLang what has not been recorded yet, or everything, and forgets what is not asked any more."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("url", help="of an SGLang that serves the tests' tiny checkpoint")
    parser.add_argument("--all", action="store_true", help="ask everything again")
    given = parser.parse_args()
    requests, _ = read_list()
    known = read_answers() if ANSWERS.exists() and not given.all else {}
    with client(given.url) as http:
        answers = {one.id: known.get(one.id) or ask(http, one) for one in requests if not one.kills}
    rows = [f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
    ANSWERS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
