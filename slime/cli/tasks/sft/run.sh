#!/usr/bin/env bash
# Makes the data and a tiny random model, and lets it imitate (run.yaml).
# Flags that are given win over run.yaml: bash run.sh --lr 2e-3
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
# Threads that wait for one another on few cores are slow; nothing here needs more than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

[[ -f data/eval.jsonl ]] || python make_data.py
[[ -f outputs/model/config.json ]] || python -m slime.cli.tiny_model --output outputs/model --num-layers 2
slime train --config run.yaml "$@"
slime report outputs/run
