#!/usr/bin/env bash
# Lets each algorithm practise the quickstart's task from one and the same start, on two CPU cores.
#
#     bash scripts/learning.sh [--only rloo gspo ...] [--rollouts N] [--output DIR]
#
# All of them take about half an hour. Curves go to benchmarks/results/learning.json.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"

use_environment
share_cores_politely
export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
# -P: a folder `tools` where this is called from is not meant.
exec python -P -m tools.quickstart.learning "$@"
