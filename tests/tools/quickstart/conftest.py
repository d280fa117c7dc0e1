"""A made-up quickstart run, as the phases would leave it."""

import math
from pathlib import Path

import pytest
import torch

from slime.observability.jsonl import JsonlWriter, read_metrics
from tools.make_tiny_model import make_tokenizer
from tools.quickstart.layout import Layout

ROLLOUTS = 15


def conversation(question: str, answer: str, use_tool: bool) -> str:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    if not use_tool:
        return prompt + "\\boxed{17}<|im_end|>"
    call = f"<tool_call>{question}</tool_call><|im_end|>\n"
    result = f"<|im_start|>user\n<tool_response>{answer}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    return prompt + call + result + f"\\boxed{{{answer}}}<|im_end|>"


def write_recording(path: Path, share: float, dataset: str | None = None) -> None:
    """Ten samples, of which ``share`` use the tool and are right."""
    tokenizer, samples = make_tokenizer(), []
    for index in range(10):
        first, use_tool = 12 + index, index < round(10 * share)
        text = conversation(f"{first}*34", str(first * 34), use_tool)
        samples.append(
            {
                "tokens": tokenizer(text, add_special_tokens=False)["input_ids"],
                "label": str(first * 34),
                "reward": float(use_tool),
                "metadata": {"dataset": dataset} if dataset else {},
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": 0, "samples": samples}, path)


def write_metrics(path: Path) -> None:
    writer = JsonlWriter(path)
    for step in range(ROLLOUTS):
        reward = 0.4 + 0.55 * (1 - math.exp(-step / 4))
        if step in (0, 5, 10):
            writer.write("eval", step, {"eval/sampled": reward - 0.01, "eval/greedy": min(1.0, step / 5)})
        writer.write(
            "rollout", step, {"rollout/raw_reward": reward, "rollout/response_len/mean": 9 + 12 * reward}
        )
        gap = {"train/train_rollout_logprob_abs_diff": 2e-7 * (1 + step % 3)}
        writer.write("train", step, gap)
        times = {"perf/rollout_time": 3.0, "perf/log_probs_time": 0.6, "perf/actor_train_time": 1.4}
        writer.write("rollout", step, {**times, "perf/update_weights_time": 0.3, "perf/step_time": 5.6})
    writer.write("eval", ROLLOUTS, {"eval/sampled": 0.95, "eval/greedy": 1.0})
    writer.close()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "out")
    write_metrics(layout.rl_metrics)
    make_tokenizer().save_pretrained(layout.sft_model)
    for step in range(ROLLOUTS):
        write_recording(layout.recordings / f"{step}.pt", 0.4 + 0.04 * step)
    write_recording(layout.recordings / "eval_0.pt", 0.4, "sampled")
    write_recording(layout.recordings / f"eval_{ROLLOUTS}.pt", 0.9, "sampled")
    return layout


@pytest.fixture
def metrics(layout: Layout):
    return read_metrics(layout.rl_metrics)
