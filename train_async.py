"""Asynchronous training: while the trainer works on one rollout, the engines generate the next.

    python train_async.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rollout-batch-size 32 ...

``slime train --async`` is the same command, where the package is installed without this file.
"""

import sys

from slime.ray.asynchronous import notes, refusal, train
from slime.ray.session import main

if __name__ == "__main__":
    main(train, refusal, notes, ["--async", *sys.argv[1:]])
