import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from slime.observability.jsonl import JsonlWriter
from tools.quickstart.__main__ import MARKER, main, prepare_output, print_figures
from tools.quickstart.layout import Layout
from tools.quickstart.phases import (
    Phase,
    Progress,
    environment,
    plan,
    rl_progress,
    sft_progress,
    write_eval_config,
    write_summary,
)
from tools.quickstart.runner import PhaseFailed, run_phase
from tools.quickstart.summary import summarise

ROOT = Path(__file__).parents[3]
ONE_LONG_PHASE = """
import sys
from tools.quickstart import __main__ as quickstart
from tools.quickstart.phases import Phase, Progress

code = f"import os, time; open({sys.argv[1]!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
phase = Phase("p", "P", [sys.executable, "-c", code], 1, lambda: Progress(0, []))
quickstart.plan = lambda *_: [phase]
sys.exit(quickstart.main(["--output", sys.argv[2]]))
"""


def make_phase(code, lines=(), every=1):
    return Phase(
        "demo", "A demo", [sys.executable, "-c", code], 2, lambda: Progress(len(lines), list(lines)), every
    )


def run(phase, tmp_path):
    stream = io.StringIO()
    seconds = run_phase(phase, tmp_path / "logs" / "demo.log", {}, Console(file=stream, width=100))
    return seconds, stream.getvalue()


def test_a_phase_prints_its_title_and_each_line_once(tmp_path):
    seconds, output = run(make_phase("import time; time.sleep(1.2)", ["one", "two"]), tmp_path)
    assert output == "A demo\n  one\n  two\n"
    assert seconds > 1


def test_every_nth_line_is_enough_where_no_bar_can_be_drawn(tmp_path):
    _, output = run(make_phase("pass", [f"line {number}" for number in range(1, 7)], every=3), tmp_path)
    assert output == "A demo\n  line 3\n  line 6\n"


def test_a_failed_phase_names_its_cause_and_its_log(tmp_path):
    with pytest.raises(PhaseFailed) as caught:
        run(make_phase("print('first'); raise SystemExit('error: no such model')"), tmp_path)
    assert str(caught.value) == (
        f"demo failed with exit status 1 (log: {tmp_path}/logs/demo.log): error: no such model"
    )


def test_sigterm_ends_the_phase_that_runs(tmp_path):
    """The child outlives neither its phase nor the quickstart."""
    script, pid_file = tmp_path / "quickstart.py", tmp_path / "pid"
    script.write_text(ONE_LONG_PHASE)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(pid_file), str(tmp_path / "out")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not pid_file.exists() or not pid_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = os.pidfd_open(int(pid_file.read_text()))  # its number may be another's once it has ended
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    assert select.select([child], [], [], 0)[0]
    os.close(child)


def test_earlier_results_are_replaced_and_foreign_files_are_not(tmp_path):
    root = tmp_path / "out"
    prepare_output(root)
    (root / "summary.json").write_text("{}")
    prepare_output(root)
    assert [path.name for path in root.iterdir()] == [MARKER]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not a quickstart's"):
        prepare_output(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["--seed", "-1"])


def test_progress_of_rl_shows_rewards_and_evaluations_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert rl_progress(path) == Progress(0, [])
    writer = JsonlWriter(path)
    writer.write("eval", 0, {"eval/sampled": 0.4, "eval/greedy": 0.0})
    writer.write("rollout", 0, {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 12.0})
    assert rl_progress(path) == Progress(0, ["held-out accuracy after 0 rollouts: 40% sampled, 0% greedy"])
    writer.write("eval", 1, {"eval/sampled": 0.9, "eval/greedy": 1.0})
    writer.write("rollout", 0, {"perf/step_time": 1.0})
    progress = rl_progress(path)
    assert progress.done == 1
    assert progress.lines[1] == "rollout  1   " + "█" * 12 + "░" * 12 + "   reward 0.50   12.0 tokens"
    assert progress.lines[2].startswith("held-out accuracy after 1 rollouts: 90% sampled")


def test_progress_of_sft_shows_the_last_loss_of_a_rollout(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(4):
        writer.write("train", step, {"train/loss": 1.0 - step / 10})
        if step % 2:
            writer.write("rollout", step // 2, {"perf/step_time": 1.0})
    assert sft_progress(path, steps_per_rollout=2) == Progress(
        2, ["step   2   loss 0.900", "step   4   loss 0.700"]
    )


def test_phases_hand_their_files_to_one_another(tmp_path):
    layout = Layout(tmp_path)
    model, data, sft, grpo = plan(layout, seed=5)
    assert "5" in model.command and "5" in data.command
    scripts = {phase.name: (ROOT / phase.command[1]).read_text() for phase in (sft, grpo)}
    assert '--save-hf "$OUTPUT/model-sft"' in scripts["sft"]
    assert '--hf-checkpoint "$OUTPUT/model-sft"' in scripts["grpo"]
    assert layout.sft_model.name == "model-sft"
    write_eval_config(layout)
    datasets = yaml.safe_load((tmp_path / "eval.yaml").read_text())["eval"]["datasets"]
    assert [(d["name"], d["temperature"]) for d in datasets] == [("sampled", 1.0), ("greedy", 0.0)]


def test_figures_are_printed_and_written(layout, metrics):
    stream = io.StringIO()
    summary = summarise(metrics, {"sft": 1.0}, seed=0, wall_s=100.0)
    print_figures(layout, summary, Console(file=stream, width=120))
    assert "sampled   39% → 95%" in stream.getvalue()
    write_summary(layout, summary)
    assert json.loads(layout.summary.read_text())["eval_greedy_rl"] == 1.0


def test_the_scripts_train_with_the_trainer_that_is_asked_for(tmp_path):
    layout = Layout(tmp_path)
    *_, sft, grpo = plan(layout, seed=5)
    for phase in (sft, grpo):
        assert environment(layout, 5, phase, "fsdp")["TRAIN_BACKEND"] == "fsdp"
        assert '--train-backend "${TRAIN_BACKEND:-megatron}"' in (ROOT / phase.command[1]).read_text()
