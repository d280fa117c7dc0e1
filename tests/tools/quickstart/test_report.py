import re
from html.parser import HTMLParser

import pytest

from tools.quickstart.algorithms import ALGORITHMS, title
from tools.quickstart.report import write_report
from tools.quickstart.summary import mean_step_seconds, summarise
from tools.quickstart.transcripts import load_tokenizer, parse_turns, pick_pairs, read_recording, tool_share

PHASES = {"model and data": 7.0, "SFT": 110.0, "RL": 140.0}
VOID = {"meta", "br", "line", "polyline", "rect"}


class Balance(HTMLParser):
    """Fails on tags that are closed in the wrong order."""

    def __init__(self):
        super().__init__()
        self.open, self.count = [], {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def page(layout, metrics):
    summary = summarise(metrics, PHASES, seed=3, wall_s=271.4)
    write_report(layout, metrics, summary)
    return layout.report.read_text()


def test_summary_has_the_promised_figures(metrics):
    summary = summarise(metrics, PHASES, seed=3, wall_s=271.4)
    assert summary["eval_sampled_sft"] == pytest.approx(0.39)
    assert (summary["eval_sampled_rl"], summary["eval_greedy_rl"]) == (0.95, 1.0)
    assert summary["first_logprob_abs_diff"] == 2e-7
    assert (summary["wall_s"], summary["phase_s"], summary["seed"]) == (271.4, PHASES, 3)


def test_summary_needs_an_evaluation_on_both_sides_of_training(metrics):
    metrics["eval"] = {5: metrics["eval"][5]}
    with pytest.raises(ValueError, match=r"evaluations at \[5\]"):
        summarise(metrics, PHASES, seed=0, wall_s=1.0)


def test_summary_names_a_metric_that_no_step_has(metrics):
    for row in metrics["train"].values():
        del row["train/train_rollout_logprob_abs_diff"]
    with pytest.raises(ValueError, match="none of 15 RL steps has train/train_rollout_logprob_abs_diff"):
        summarise(metrics, PHASES, seed=0, wall_s=1.0)


def test_a_run_whose_first_steps_are_the_critics_has_its_report(layout, metrics):
    del metrics["train"][0]
    metrics["train"][0] = {"train/critic-value_loss": 0.3}
    summary = summarise(metrics, PHASES, seed=0, wall_s=1.0, algorithm="ppo")
    assert summary["first_logprob_abs_diff"] == 4e-7
    write_report(layout, metrics, summary)
    page = layout.report.read_text()
    assert "logs/ppo.log" in page and "<b>PPO</b>" in page and "the critic, expected" in page


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_report_says_by_which_algorithm_the_model_practised(layout, metrics, algorithm):
    summary = summarise(metrics, PHASES, seed=0, wall_s=1.0, algorithm=algorithm)
    for recording in layout.recordings.iterdir():
        recording.unlink()
    write_report(layout, metrics, summary)
    page = layout.report.read_text()
    assert f"<b>{title(algorithm)}</b>" in page and f"logs/{algorithm}.log" in page
    assert ("mean of its group" in page) == (algorithm not in ("ppo", "reinforce_plus_plus"))


def test_the_rest_of_a_step_is_what_no_part_accounts_for():
    row = {
        "perf/step_time": 10.0,
        "perf/rollout_time": 4.0,
        "perf/actor_train_time": 2.0,
        "perf/eval_time": 3.0,
    }
    seconds = mean_step_seconds({0: row})
    assert seconds == {"generate": 4.0, "train": 2.0, "rest": 1.0}


def test_report_is_one_well_formed_file_that_loads_nothing(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.count["svg"] == 7
    assert not re.search(r"<script|<link|src=|url\(|@import|https?://", page)


def test_report_shows_the_figures_and_the_transcripts(page):
    for text in (
        "39% →</span> 95%",
        "4 min 31 s",
        "&lt;tool_call&gt;16*34&lt;/tool_call&gt;",
        "calculator",
        "✗ wrong",
    ):
        assert text in page
    assert page.count('class="card pair"') == 4


def test_report_works_without_recordings(layout, metrics):
    for path in layout.recordings.iterdir():
        path.unlink()
    write_report(layout, metrics, summarise(metrics, PHASES, seed=3, wall_s=1.0))
    page = layout.report.read_text()
    assert "No recordings were found" in page
    assert page.count("<svg") == 6


def test_turns_of_a_tool_conversation():
    text = (
        "<|im_start|>user\n2*3<|im_end|>\n<|im_start|>assistant\n<tool_call>2*3</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>6</tool_response><|im_end|>\n<|im_start|>assistant\n\\boxed{6"
    )
    turns = [(turn.speaker, turn.text) for turn in parse_turns(text)]
    assert turns == [
        ("user", "2*3"),
        ("assistant", "<tool_call>2*3</tool_call>"),
        ("calculator", "6"),
        ("assistant", "\\boxed{6"),
    ]


def test_pairs_are_picked_by_position_and_kind(layout):
    tokenizer = load_tokenizer(layout.sft_model)
    before = read_recording(layout.recordings / "eval_0.pt", tokenizer)
    after = read_recording(layout.recordings / "eval_15.pt", tokenizer)
    pairs = pick_pairs(before, after)
    assert [pair[0].question for pair in pairs] == ["16*34", "12*34", "21*34", "17*34"]
    assert all(first.question == second.question for first, second in pairs)
    assert (tool_share(before), tool_share(after)) == (0.4, 0.9)
