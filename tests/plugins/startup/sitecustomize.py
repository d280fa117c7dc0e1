"""Read by each Python process that starts: random delays, if the test that started it has them."""

import os
import sys
from pathlib import Path

if "SLIME_RANDOM_DELAYS" in os.environ:
    root = str(Path(__file__).parents[3])
    sys.path.append(root)
    from tests.plugins.random_delays import install

    sys.path.remove(root)
    install(os.environ["SLIME_RANDOM_DELAYS"])
