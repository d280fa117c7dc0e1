"""Samples of a step are those of its recording, whoever has written it."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime.dashboard import recordings as module
from slime.dashboard import samples
from slime.dashboard.recordings import LISTED, WINDOW, RecordingError, Recordings, files_of
from slime.dashboard.run import Run
from slime.dashboard.server import dashboard
from slime.dashboard.token_texts import TokenTexts
from slime.observability.rollout_data_utils import recording_path
from tests.dashboard.planted import ATTACK, COLLAPSED, MASKED, RECORDED, plant


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    return plant(tmp_path_factory.mktemp("planted"))


def of(directory: Path) -> Recordings:
    names = (f"{directory}/none/{{rollout_id}}.pt", f"{directory}/rollout_data/{{rollout_id}}.pt")
    return Recordings(names, (f"{directory}/train_data/{{rollout_id}}.pt",))


def written(directory: Path, *samples: object) -> Recordings:
    torch.save({"rollout_id": 0, "samples": list(samples)}, directory / "0.pt")
    return Recordings([f"{directory}/{{rollout_id}}.pt"])


def test_files_are_found_by_the_names_that_a_run_gives_them(tmp_path) -> None:
    for template in ("a/{rollout_id}.pt", "b[1]/{rollout_id:06d}.pt", "c/{rollout_id}/data-{rollout_id}.pt"):
        names = [recording_path(str(tmp_path / template), step, evaluation=False) for step in (3, 10)]
        evaluation = recording_path(str(tmp_path / template), 3, evaluation=True)
        for path in (*names, evaluation, names[0].with_suffix(".partial")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        assert files_of(str(tmp_path / template)) == dict(zip((3, 10), names, strict=True))
    assert files_of(str(tmp_path / "a/3.pt")) == files_of("{rollout_id.__class__}") == {}


def test_steps_are_listed_without_opening_a_file(tmp_path) -> None:
    for step in range(LISTED + 5):
        (tmp_path / f"{step}.pt").touch()
    shown = Recordings([f"{tmp_path}/{{rollout_id}}.pt"]).steps()
    assert shown == {"count": LISTED + 5, "steps": list(range(5, LISTED + 5)), "trained": False}


def test_a_sample_has_what_is_known_of_each_token_before_and_after_training(planted) -> None:
    recordings = of(planted)
    assert recordings.steps() == {"count": 3, "steps": list(RECORDED), "trained": True}
    listed = recordings.samples(COLLAPSED - 1)
    assert [line["reward"] for line in listed["samples"]] == [0, 1, 0, 1] and listed["count"] == 4
    assert listed["samples"][2] | {"response": ""} == {
        **{"number": 2, "index": 2, "group": 1, "status": "completed", "reward": 0.0, "label": "42"},
        **{"removed": False, "length": 7, "trained": 7, "prompt": "What is the answer?", "response": ""},
    }
    shown = recordings.sample(COLLAPSED - 1, 2)
    assert (shown["total"], shown["of_prompt"], shown["texts"][3]) == (10, 3, "0 ")
    assert shown["response"].endswith(ATTACK)
    values = shown["values"]
    assert values["log-prob, engine"] == pytest.approx([None] * 3 + [-0.1 * place for place in range(1, 8)])
    assert values["gap"] == pytest.approx([None] * 3 + [-0.5] * 7, abs=1e-6)
    assert not {"log-prob, after the step", "change by the step"} & values.keys()
    later = recordings.sample(COLLAPSED, 2)["values"]
    change = [None] * 3 + [0.2] + [-0.1] * 6
    assert later["change by the step"] == pytest.approx(change, abs=1e-6)
    assert later["log-prob, after the step"][3] == pytest.approx(-0.1 - 0.5 + 0.2, abs=1e-6)
    assert values["advantage"] == [None] * 3 + [0.5] * 7 and values["mask"] == [None] * 3 + [1.0] * 7
    assert values["version"] == [None] * 3 + ["3"] * 2 + ["4"] * 5
    assert "entropy" not in values, "of which the file has a rank's piece only"
    assert recordings.samples(MASKED)["samples"][0]["trained"] == 0


def test_pages_of_samples_and_windows_of_tokens_are_bounded(tmp_path) -> None:
    long = {"tokens": list(range(5, 5 + WINDOW + 30)), "response_length": WINDOW + 10}
    long["rollout_log_probs"] = [float(place) for place in range(WINDOW + 10)]
    recordings = written(tmp_path, *[long] * (LISTED + 1))
    assert len(recordings.samples(0)["samples"]) == LISTED
    (last,) = recordings.samples(0, LISTED)["samples"]
    assert last["number"] == LISTED
    first, rest = recordings.sample(0, 0), recordings.sample(0, 0, WINDOW)
    assert len(first["ids"]) == WINDOW and rest["ids"] == long["tokens"][WINDOW:]
    column = first["values"]["log-prob, engine"] + rest["values"]["log-prob, engine"]
    assert column == [None] * 20 + long["rollout_log_probs"]
    asked = written(tmp_path, {**long, "response_length": 5, "rollout_log_probs": [1.0] * 5})
    assert asked.sample(0, 0)["values"]["log-prob, engine"] == [None] * WINDOW, "all of the prompt"
    recordings = written(tmp_path, long)
    inner = recordings.sample(0, 0, 10)["values"]["log-prob, engine"]
    assert inner == column[10 : 10 + WINDOW]


STRANGE = (
    {},
    {"tokens": "text", "response_length": "many", "prompt": 7, "reward": object},
    {"tokens": [1, [2]], "response_length": -3, "prompt": [{"role": "user", "content": "hi"}, 4]},
    {"tokens": [1, 2], "response_length": 9, "loss_mask": [1], "rollout_log_probs": torch.ones(2, 2)},
    {"tokens": np.arange(3), "response_length": np.int64(2), "rollout_log_probs": [float("nan"), 1.0]},
    {"tokens": [1, 2], "response_length": 2, "version_spans": [("1", -5), ("2", 10**9), 3, ("x",)]},
    {
        "tokens": torch.arange(2),
        "response_length": 1,
        "reward": {"score": 1, "why": [1], "all": float("inf")},
    },
)


def test_samples_of_strange_content_are_shown_as_far_as_they_are_samples(tmp_path) -> None:
    recordings = written(tmp_path, "no sample", *(s for s in STRANGE if s.get("reward") is not object))
    shown = [recordings.sample(0, number) for number in range(recordings.samples(0)["count"])]
    assert [len(sample["ids"]) for sample in shown] == [0, 0, 0, 2, 3, 2, 2]
    assert shown[2]["prompt"] == "[user]\nhi"
    assert shown[3]["values"].keys() == {"version"}
    assert shown[4]["values"]["log-prob, engine"] == [None, None, 1.0]
    assert shown[5]["values"]["version"] == ["2", "2"]
    assert shown[6]["reward"] == {"score": 1.0, "why": None, "all": None}


def test_half_a_character_hides_nothing(tmp_path) -> None:
    half = "\ud83d"
    fields = dict.fromkeys(("label", "response", "prompt", "status"), half)
    recordings = written(tmp_path, {**fields, "reward": {half: half}, "weight_versions": [half]})
    run = Run("one", tmp_path / "metrics.jsonl", recordings=recordings)
    client = TestClient(dashboard([run], "key", "127.0.0.1"), base_url="http://127.0.0.1")
    (line,) = client.get("/key/api/samples?run=one&step=0").json()["samples"]
    shown = client.get("/key/api/sample?run=one&step=0&number=0").json()
    assert {line["response"], shown["response"], *shown["reward"]} == {half}


class Attack:
    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_file_runs_no_code(tmp_path) -> None:
    target = tmp_path / "made"
    recordings = written(tmp_path, {"metadata": Attack(str(target))})
    with pytest.raises(RecordingError, match=r"0.pt: UnpicklingError"):
        recordings.samples(0)
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Attack(str(target))))
    with pytest.raises(RecordingError, match=r"1.pt: BadZipFile"):
        recordings.samples(1)
    assert not target.exists()


def test_lists_that_hold_one_another_many_times_are_not_walked_through(tmp_path) -> None:
    deep: list = [1]
    for _ in range(60):
        deep = [deep, deep]
    recordings = written(tmp_path, {"tokens": deep, "prompt": deep, "reward": {"a": deep}, "metadata": deep})
    assert recordings.sample(0, 0)["ids"] == []


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch) -> None:
    recordings = written(tmp_path, {"tokens": [1] * 1000, "response_length": 1})
    monkeypatch.setattr(module, "LARGEST_PICKLE", 100)
    with pytest.raises(RecordingError, match=r"0.pt: 0 MiB of lists and texts \(shown: up to 0\)"):
        recordings.samples(0)
    monkeypatch.setattr(module, "LARGEST_PICKLE", 10**6)
    monkeypatch.setattr(samples, "_LARGEST_SUM", 100)
    with pytest.raises(RecordingError, match="more than 100 tokens in it"):
        recordings.samples(0)


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path, monkeypatch) -> None:
    read, load = [], module.load
    monkeypatch.setattr(module, "load", lambda path: read.append(path) or load(path))
    recordings = written(tmp_path, {"response": "a"})
    for _ in range(3):
        assert recordings.samples(0)["samples"][0]["response"] == "a"
    assert len(read) == 1
    written(tmp_path, {"response": "other"})
    assert recordings.samples(0)["samples"][0]["response"] == "other" and len(read) == 2


def test_what_is_not_there_is_said(planted) -> None:
    with pytest.raises(RecordingError, match="rollout 3: no recording of it"):
        of(planted).samples(3)
    with pytest.raises(RecordingError, match=f"sample 4: rollout {COLLAPSED} has 4"):
        of(planted).sample(COLLAPSED, 4)


def test_texts_of_tokens_are_those_of_the_vocabulary(tmp_path) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġb": 1, "Ċ": 2, "▁c": 3}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path / "tokenizer.json")
    assert texts.of([0, 1, 2, 3, 4, 99, -1]) == ["a", " b", "\n", " c", "<|im_end|>", "<99>", "<-1>"]
    assert TokenTexts(tmp_path / "none.json").of([5]) == TokenTexts().of([5]) == ["5 "]
    (tmp_path / "broken.json").write_text("{")
    assert TokenTexts(tmp_path / "broken.json").of([5]) == ["5 "]
