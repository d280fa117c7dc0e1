"""Time to the first batch of a large JSONL, and the memory it takes, against Hugging Face `datasets`.

    python benchmarks/data_loading.py [--gigabytes 2] [--batch 32] [--batches 100]

Writes a JSONL of problems of about 1.3 kB into a temporary directory and reads shuffled prompts of it, each
contender in a process of its own:

- `slime`: `slime.utils.data.Dataset` as the data source opens it, an index of lines, shuffled as a whole;
- `slime, checked`: the same, after every record was looked at;
- `datasets, streaming`: `load_dataset(streaming=True).shuffle(buffer_size=10_000)`, which mixes neighbours;
- `datasets, mapped`: `load_dataset` into Arrow files and a shuffled index.

Prints and writes JSON: seconds until the first batch is there, seconds per batch of the following ones, and
the peak of resident memory beyond what the imports take, in MiB. All find the file in the page cache.
`ratio` is what `datasets, streaming` needs over what `slime` needs.
"""

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "data_loading.json"
SEED = 1


def write_jsonl(path: Path, size: int) -> int:
    """Problems until the file has `size` bytes; returns their number."""
    words = random.Random(SEED).choices(
        ["sum", "of", "all", "prime", "numbers", "below", "what", "is"], k=4096
    )
    count = written = 0
    with path.open("w") as stream:
        while written < size:
            start = (count * 37) % 3800
            text = f"Problem {count}: " + " ".join(words[start : start + 200 + count % 60])
            record = {"input": text, "label": str(count), "metadata": {"level": count % 5, "id": f"p{count}"}}
            written += stream.write(json.dumps(record) + "\n")
            count += 1
    return count


def slime_batches(path: str, batch: int, check: bool = False) -> Iterator[list[str]]:
    from slime.utils.data import Dataset

    dataset = Dataset(path, None, prompt_key="input", label_key="label", seed=SEED, check=check)  # type: ignore[arg-type]
    dataset.shuffle(0)
    for start in range(0, len(dataset), batch):
        yield [sample.prompt for sample in dataset.samples[start : start + batch]]


def checked_batches(path: str, batch: int) -> Iterator[list[str]]:
    return slime_batches(path, batch, check=True)


def streaming_batches(path: str, batch: int) -> Iterator[list[str]]:
    import datasets

    rows = datasets.load_dataset("json", data_files=path, split="train", streaming=True)
    for rows_of_batch in rows.shuffle(seed=SEED, buffer_size=10_000).iter(batch_size=batch):
        yield rows_of_batch["input"]


def mapped_batches(path: str, batch: int) -> Iterator[list[str]]:
    import datasets

    cache = str(Path(path).parent / "cache")
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache).shuffle(seed=SEED)
    for rows_of_batch in rows.iter(batch_size=batch):
        yield rows_of_batch["input"]


CONTENDERS: dict[str, Callable[[str, int], Iterator[list[str]]]] = {
    "slime": slime_batches,
    "slime, checked": checked_batches,
    "datasets, streaming": streaming_batches,
    "datasets, mapped": mapped_batches,
}


def resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(name: str, path: str, batch: int, batches: int) -> dict[str, float]:
    """Runs in a process of its own."""
    import datasets

    import slime.utils.data

    assert datasets and slime.utils.data
    before, start = resident(), time.perf_counter()
    source = CONTENDERS[name](path, batch)
    assert len(next(source)) == batch
    first = time.perf_counter() - start
    for _ in range(batches):
        next(source)
    following = (time.perf_counter() - start - first) / batches
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"first_batch_s": first, "next_batch_s": following, "peak_mib": max(peak - before, 0.1)}


def compare(gigabytes: float, batch: int, batches: int) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "problems.jsonl"
        records = write_jsonl(path, int(gigabytes * 1e9))
        for name in CONTENDERS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[name] = pool.apply(measure, (name, str(path), batch, batches))
    streaming, ours = found["datasets, streaming"], found["slime"]
    ratio = {key: streaming[key] / ours[key] for key in ours}
    return {"gigabytes": gigabytes, "records": records, "batch": batch, "contenders": found, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = compare(options.gigabytes, options.batch, options.batches)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
