"""The packed trainer against the same model in transformers with padded batches.

    python benchmarks/trainer_packing.py [--size 0.5M] [--samples 64] [--repeats 3]

One policy-gradient step over 64 samples whose lengths spread as those of real responses do (log-normal,
capped), float32, one process, one thread. Both sides see at most 2,048 tokens per micro-batch: packed
rows here, there samples in the order they came, padded to the longest of their micro-batch
("sorted" pads as little as sorting by length allows). Prints and writes JSON: tokens per second, wall
and CPU, real tokens only, the best of the repeats, which alternate between the sides; and the ratios
(target: packed at least 1.3 times "padded").
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from slime.ray.train_worker import TrainWorker

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trainer_packing.json"
BUDGET = 2048
SAMPLES = 64
# hidden size, layers, FFN size, heads, vocabulary
SIZES = {"0.5M": (128, 3, 256, 4, 320), "10M": (320, 7, 1024, 8, 320)}


def make_model(directory: str, size: str) -> None:
    hidden, layers, ffn, heads, vocab = SIZES[size]
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)


def make_batch(vocab: int, samples: int = SAMPLES) -> dict:
    """Prompts of 16 to 63 tokens; responses log-normal around 128, between 8 and 960."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(16, 64, (samples,), generator=generator)
    responses = (128 * torch.randn(samples, generator=generator).mul(0.8).exp()).clamp(8, 960).long()
    tokens = [
        torch.randint(vocab, (int(p + r),), generator=generator).tolist()
        for p, r in zip(prompts, responses, strict=True)
    ]
    lengths = responses.tolist()
    rewards = torch.randn(samples, generator=generator).tolist()
    return {
        "tokens": tokens,
        "response_lengths": lengths,
        "loss_masks": [[1] * length for length in lengths],
        "rollout_mask_sums": lengths,
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [0] * samples,
        "sample_indices": [*range(samples)],
        "rollout_ids": [*range(samples)],
    }


def packed_step(directory: str, batch: dict) -> Callable[[], None]:
    """A step of our trainer."""
    # The flags of a small run, which the tests keep.
    sys.path.insert(0, str(ROOT))
    from tests.trainer_batches import split, trainer_args

    args = trainer_args(
        directory,
        max_tokens_per_gpu=BUDGET,
        global_batch_size=len(batch["tokens"]),
        data_pad_size_multiplier=128,
        lr=1e-5,
        clip_grad=1.0,
    )
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, batch, worker.parallel_config())

    def step() -> None:
        worker.train_shard(0, shard)[0]

    return step


def padded_step(directory: str, batch: dict, *, by_length: bool) -> Callable[[], None]:
    """Takes the same step in plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), fused=True)
    micro_batches = _padded_micro_batches(batch, by_length)

    def step() -> None:
        optimizer.zero_grad()
        for indices in micro_batches:
            _padded_loss(model, batch, indices).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _padded_micro_batches(batch: dict, by_length: bool) -> list[list[int]]:
    """Runs of samples whose padded size fits the budget."""
    order = [*range(len(batch["tokens"]))]
    if by_length:
        order.sort(key=lambda i: len(batch["tokens"][i]))
    micro_batches: list[list[int]] = [[]]
    for i in order:
        longest = max(len(batch["tokens"][j]) for j in [*micro_batches[-1], i])
        if micro_batches[-1] and longest * (len(micro_batches[-1]) + 1) > BUDGET:
            micro_batches.append([])
        micro_batches[-1].append(i)
    return micro_batches


def _padded_loss(model: torch.nn.Module, batch: dict, indices: list[int]) -> torch.Tensor:
    sequences = [torch.tensor(batch["tokens"][i]) for i in indices]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    attention = torch.arange(ids.size(1)) < lengths[:, None]
    logits = model(input_ids=ids, attention_mask=attention.long(), use_cache=False).logits
    loss = logits.new_zeros(())
    for row, i in enumerate(indices):
        end, response = int(lengths[row]) - 1, batch["response_lengths"][i]
        log_softmax = logits[row, end - response : end].log_softmax(-1)
        new = log_softmax.gather(-1, ids[row, end - response + 1 : end + 1, None])[:, 0]
        ratio = (new - new.detach()).exp()
        advantage = batch["rewards"][i]
        token_loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        loss = loss + token_loss.mean() / len(batch["tokens"])
    return loss


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, float]]:
    """Least wall and CPU seconds of each step, after one that warms up."""
    best: dict[str, dict[str, float]] = {name: {"wall_s": 1e9, "cpu_s": 1e9} for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            if repeat:
                best[name] = {key: min(best[name][key], seconds[key]) for key in seconds}
    return best


def run_size(size: str, samples: int, repeats: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, size)
        batch = make_batch(SIZES[size][-1], samples)
        seconds = measure(
            {
                "packed": packed_step(directory, batch),
                "padded": padded_step(directory, batch, by_length=False),
                "sorted": padded_step(directory, batch, by_length=True),
            },
            repeats,
        )
    tokens = sum(len(sample) for sample in batch["tokens"])
    packed_s = seconds["packed"]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": {name: tokens / value["wall_s"] for name, value in seconds.items()},
        "ratio_wall": {n: seconds[n]["wall_s"] / packed_s["wall_s"] for n in ("padded", "sorted")},
        "ratio_cpu": {n: seconds[n]["cpu_s"] / packed_s["cpu_s"] for n in ("padded", "sorted")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="0.5M", help="parameters of the model")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    result = run_size(options.size, options.samples, options.repeats)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results[options.size] = result
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
