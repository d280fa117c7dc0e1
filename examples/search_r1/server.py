"""A search server over a corpus of JSONL rows ``{"contents": ...}``, for this machine alone.

    python -m examples.search_r1.server --corpus corpus.jsonl --port 8000

``POST /retrieve`` takes and gives what the server of Search-R1 does, which may stand in its place:
``{"queries": ["words"], "topk": 3, "return_scores": true}`` is answered with ``{"result": [[{"document":
{"contents": ...}, "score": ...}]]}``, a list for each query.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from examples.search_r1.bm25 import BM25Index
from slime.utils.request_gate import RequestGate

HOST = "127.0.0.1"
BODY_BYTES = 2**20


class Queries(BaseModel):
    queries: list[str]
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    return_scores: bool = False


def create_app(index: BM25Index) -> FastAPI:
    """Serves an index; pages of other sites are refused."""
    app = FastAPI()
    app.add_middleware(RequestGate, host=HOST, most_bytes=BODY_BYTES)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/retrieve")
    def retrieve(asked: Queries) -> dict[str, Any]:
        found = [index.ranked(query, asked.topk) for query in asked.queries]
        if not asked.return_scores:
            return {"result": [[{"contents": text} for text, _ in passages] for passages in found]}
        return {
            "result": [
                [{"document": {"contents": text}, "score": score} for text, score in passages]
                for passages in found
            ]
        }

    return app


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    app = create_app(BM25Index.from_jsonl(args.corpus))
    uvicorn.run(app, host=HOST, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
