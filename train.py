"""Synchronous training: generate, train, sync the weights, again.

    python train.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rollout-batch-size 32 ...

``slime train`` is the same command, where the package is installed without this file.
"""

from slime.ray.session import main
from slime.ray.synchronous import notes, refusal, train

if __name__ == "__main__":
    main(train, refusal, notes)
