#!/usr/bin/env bash
# Trains a tiny language model to use a calculator, from nothing, on two CPU cores.
#
#     bash scripts/quickstart.sh [--seed N] [--output DIR] [--train-backend fsdp] [--advantage-estimator NAME]
#
# Makes .venv on the first run, then takes about three minutes. See docs/quickstart.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"

use_environment
share_cores_politely
export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
# -P: a folder `tools` where this is called from is not meant.
exec python -P -m tools.quickstart "$@"
