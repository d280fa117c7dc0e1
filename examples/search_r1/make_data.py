"""Write corpus.jsonl and train.jsonl: facts about invented countries, and questions about them.

    python examples/search_r1/make_data.py --output outputs/search_data --countries 200 --seed 0

No model knows the answers from its training; the corpus has each of them once. Real data goes the same way:
a corpus of rows ``{"contents": ...}``, and questions with a label.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.calculator_tool.make_data import write_jsonl

FACTS = {"capital": "What is the capital of", "river": "Which river crosses", "founder": "Who founded"}
INSTRUCTION = (
    "Search with <search>words</search>. Answer with <answer>a name</answer>. Question: {question} {country}?"
)
_STARTS, _ENDS = ("Bal", "Dor", "Fen", "Gal", "Kor", "Lor", "Mar", "Tol"), ("dia", "eth", "ona", "via", "zum")


def invented_names(rng: random.Random, count: int) -> Iterator[str]:
    """Different ones, each a word."""
    seen: set[str] = set()
    while len(seen) < count:
        middle = "".join(rng.choice("aeiou") + rng.choice("lmnrst") for _ in range(2))
        name = rng.choice(_STARTS) + middle + rng.choice(_ENDS)
        if name not in seen:
            seen.add(name)
            yield name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--countries", type=int, default=200)
    args = parser.parse_args(argv)
    if not 1 <= args.countries <= 1000:
        parser.error(f"--countries {args.countries}: wanted 1 to 1000")
    rng = random.Random(args.seed)
    names = list(invented_names(rng, args.countries * (1 + len(FACTS))))
    passages, questions = [], []
    for country in (names.pop() for _ in range(args.countries)):
        for fact, question in FACTS.items():
            answer = names.pop()
            passages.append({"contents": f"{country}\nThe {fact} of {country} is {answer}."})
            content = INSTRUCTION.format(question=question, country=country)
            questions.append({"prompt": [{"role": "user", "content": content}], "label": answer})
    rng.shuffle(passages)
    rng.shuffle(questions)
    args.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.output / "corpus.jsonl", passages)
    write_jsonl(args.output / "train.jsonl", questions)


if __name__ == "__main__":
    main()
