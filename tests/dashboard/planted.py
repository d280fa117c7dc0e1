"""A run's directory with four faults in it, of the files that a run writes, by what writes them."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from slime.config.engines import LAST_ENGINES
from slime.observability.jsonl import JsonlWriter
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.observability.spans import Span, TraceFile
from slime.utils.types import Sample

ROLLOUTS, RANKS = 60, 4
DIED, SLOW, COLLAPSED, MASKED = 12, 20, 30, 45
"""The rollouts in which the faults begin: an engine, a rank, the reward, and a plug-in's loss masks."""
FAULTS = {
    "engine died": DIED + 1,
    "slow rank": SLOW,
    "reward collapse": COLLAPSED,
    "everything masked": MASKED,
    "no gradient": MASKED,
}
"""The rules that find them, and the steps that they name."""
RECORDED = (COLLAPSED - 1, COLLAPSED, MASKED)
ATTACK = "<img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"
_WORDS = ["the", "answer", "is", "42", ".", "\n", ATTACK]


def plant(directory: Path) -> Path:
    """Writes the run and returns its directory."""
    metrics, trace = JsonlWriter(directory / "metrics.jsonl"), TraceFile(directory / "trace.json")
    for rollout in range(ROLLOUTS):
        _write_metrics(metrics, rollout)
        _write_spans(trace, rollout, 1000.0 + 10 * rollout)
    metrics.close()
    trace.close()
    for rollout in RECORDED:
        _record(directory, rollout)
    _write_engines(directory / LAST_ENGINES)
    return directory


def _write_metrics(writer: JsonlWriter, rollout: int) -> None:
    wave, length = 0.02 * (rollout % 3), 0.0 if rollout >= MASKED else 40.0
    reward = 0.02 + wave / 10 if rollout >= COLLAPSED else 0.7 + wave
    lengths = {f"rollout/response_len/{name}": length for name in ("mean", "median", "max", "min")}
    fleet = {"fleet/default/engines": 2 - (rollout == DIED), "fleet/default/replaced": int(rollout > DIED)}
    dropped = {"rollout/dropped/aborted": 3} if rollout % 20 == 7 else {}
    dropped |= {f"rollout/ledger/{account}": groups for account, groups in books_after(rollout).items()}
    writer.write(
        "rollout",
        rollout,
        {"rollout/step": rollout, "rollout/raw_reward": reward, **lengths, "rollout/truncated_ratio": 0.01}
        | {"perf/tokens_per_gpu_per_sec": 1000.0 - rollout, **(fleet if rollout >= DIED else {}), **dropped},
    )
    trained = {"train/loss": 1e-9, "train/entropy_loss": 0.6, "train/grad_norm": length / 40}
    writer.write("train", rollout, {**trained, "train/train_rollout_logprob_abs_diff": 1e-3 + wave / 100})
    times = {"perf/rollout_time": 4.0, "perf/train_time": 4.0, "perf/log_probs_time": 1.0}
    writer.write("rollout", rollout, {**times, "perf/step_time": 10.0, "perf/wait_time_ratio": 0.4})


def books_after(rollout: int) -> dict[str, int]:
    """Returns the books: each rollout trains 8 groups, some filter or drop others, and some groups go on."""
    places = {"trained": 8 * (rollout + 1), "filtered": rollout // 3, "dropped": 3 * ((rollout + 13) // 20)}
    places |= {"buffered": rollout % 4, "leased": 2 + rollout % 3}
    return {"issued": sum(places.values()), **places, "unbalanced": 0}


def _write_engines(file: Path) -> None:
    """One that took the place of that which died, one that leaves, and one that is dead when the run ends."""
    now, killed = time.time(), "its server (pid 4711) was killed by SIGKILL"
    serves = {"model": "default", "kind": "regular", "version": str(ROLLOUTS), "health": "answers"}
    state = ("serving", "serving", "draining", "dead")
    rows: list[dict[str, Any]] = [
        {**serves, "rank": rank, "state": state[rank], "url": f"http://127.0.0.1:{15000 + rank}"}
        | {"since": now - 900 + 60 * rank, "failure": "", "failed": 0.0}
        | {
            "running": 3 - rank,
            "waiting": 1 - rank % 2,
            "tokens_per_second": 41.5 - rank,
            "cache": 0.25 / (1 + rank),
        }
        for rank in range(4)
    ]
    rows[1] |= {"failure": killed, "failed": now - 850}
    silent = {"health": "", "running": None, "waiting": None, "tokens_per_second": None, "cache": None}
    rows[3] |= {**silent, "failure": "no healthy answer within 30 s", "failed": now - 720}
    file.write_text(json.dumps({"time": now - 60, "engines": rows}))


def _write_spans(trace: TraceFile, rollout: int, began: float) -> None:
    generate = [
        Span(name, began + start, began + end, lane, {"group": 0, "sample": lane - 1})
        for lane in (1, 2)
        for name, start, end in (
            ("generate", 0, 3.9),
            ("sglang_generate", 0.1, 2),
            ("tool", 2, 3),
            ("reward_model", 3, 3.9),
        )
    ]
    trace.write("rollouts", [Span("rollout", began, began + 4, attrs={"rollout": rollout}), *generate])
    for rank in range(RANKS):
        seconds = 2.5 if rank == 2 and rollout >= SLOW else 0.8
        spans = [
            Span("log_probs", began + 4, began + 4 + seconds),
            Span("optimizer_step", began + 6.5, began + 8, attrs={"rollout": rollout, "step": 0}),
            Span("actor_train", began + 6.5, began + 8),
            Span("train", began + 4, began + 8),
        ]
        trace.write(f"actor rank {rank}", spans)
    trace.write("driver", [Span("update_weights", began + 8, began + 9)])
    trace.write("driver", [Span("step", began, began + 10, attrs={"rollout": rollout})])


def _before_and_after(samples: list[Sample]) -> dict[str, list[torch.Tensor]]:
    """What the step has made less probable, all but the first token."""
    before = [torch.tensor(sample.rollout_log_probs) - 0.5 for sample in samples]
    change = torch.tensor([0.2, *[-0.1] * (len(_WORDS) - 1)])
    return {"before_log_probs": before, "after_log_probs": [values + change for values in before]}


def _record(directory: Path, rollout: int) -> None:
    prompt = 3
    samples = [
        Sample(
            group_index=number // 2,
            index=number,
            prompt="What is the answer?",
            tokens=[100, 101, 102, *range(len(_WORDS))],
            response=" ".join(_WORDS),
            response_length=len(_WORDS),
            label="42",
            reward=0.0 if rollout >= COLLAPSED else float(number % 2),
            loss_mask=[int(rollout < MASKED)] * len(_WORDS),
            rollout_log_probs=[-0.1 * (place + 1) for place in range(len(_WORDS))],
            version_spans=[("3", 2), ("4", len(_WORDS) - 2)],
            status=Sample.Status.COMPLETED,
        )
        for number in range(4)
    ]
    template = str(directory / "rollout_data" / "{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=rollout, evaluation=False)
    shards = [
        {
            "tokens": [torch.tensor(sample.tokens) for sample in half],
            "sample_indices": [sample.index for sample in half],
            "log_probs": [torch.tensor(sample.rollout_log_probs) - 0.5 for sample in half],
            "advantages": [torch.full((len(_WORDS),), float(sample.index or 0) - 1.5) for sample in half],
            **(_before_and_after(half) if rollout >= COLLAPSED else {}),
            "entropy": [torch.zeros(2) for _ in half],  # a rank's piece of it, as with context parallelism
        }
        for half in (samples[:2], samples[2:])
    ]
    assert len(samples[0].tokens) == prompt + len(_WORDS)
    (directory / "train_data").mkdir(exist_ok=True)
    torch.save({"rollout_id": rollout, "shards": shards}, directory / "train_data" / f"{rollout}.pt")
