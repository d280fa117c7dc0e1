#!/usr/bin/env bash
# Makes the data and a tiny random model; a teacher and a student imitate (sft.yaml); then the student answers, and
# learns what the teacher would have said (run.yaml and teacher.yaml). Flags that are given go there: bash run.sh --lr 2e-4
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
# Threads that wait for one another on few cores are slow; nothing here needs more than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

[[ -f data/eval.jsonl ]] || python make_data.py
[[ -f outputs/model/config.json ]] || python -m slime.cli.tiny_model --output outputs/model --num-layers 2
[[ -f outputs/model-teacher/config.json ]] || slime train --config sft.yaml \
    --prompt-data data/teacher.jsonl --run-dir outputs/teacher --save-hf outputs/model-teacher
[[ -f outputs/model-sft/config.json ]] || slime train --config sft.yaml
slime train --config run.yaml --config teacher.yaml "$@"
slime report outputs/run
