#!/usr/bin/env bash
# What there is to measure on a GPU, in pieces of less than ten minutes; docs/gpu.md says in which order.
#
#     bash scripts/gpu.sh check|tests|engine|loop-test|trainer|trainer-4B|loop|sglang-test|sglang ...
#
# Each writes its log to $OUT/NAME.log, and its exit status and seconds to $OUT/summary.txt. A piece that fails does
# not keep the next ones from running; the exit status is then 1. It uses the python3 of the PATH, or $PYTHON.
# shellcheck disable=SC2329  # piece calls them
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit
export PYTHON=${PYTHON:-python3} OUT=${OUT:-outputs/gpu}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
# Processes that are forked from one that asked whether there is a GPU could not use it otherwise.
export PYTORCH_NVML_BASED_CUDA_CHECK=1

status=0
piece() { # piece NAME SECONDS COMMAND...
    local name=$1 limit=$2 started=$SECONDS rc
    shift 2
    timeout -k 10 "$limit" bash -c '"$@"' _ "$@" >"$OUT/$name.log" 2>&1
    rc=$?
    tail -n "${TAIL:-15}" "$OUT/$name.log" | cut -c1-300
    echo "$name: exit status $rc, $((SECONDS - started)) s" | tee -a "$OUT/summary.txt"
    [ $rc = 0 ] || status=1
}
pytests() { "$PYTHON" -m pytest -p no:cacheprovider -q --durations=10 -m gpu "$@"; }
trainer() { "$PYTHON" benchmarks/gpu_trainer.py --output "$OUT/trainer.json" "$@"; }
loop() { "$PYTHON" benchmarks/gpu_loop.py --output "$OUT/loop.json" "$@"; }

check() {
    nvidia-smi
    "$PYTHON" - <<'PYTHON'
import megatron.core, ray, torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__, "ray", ray.__version__)
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory >> 20, "MiB")
from benchmarks.gpu_trainer import peak_flops
print("peak", peak_flops(torch.cuda.get_device_name(), "bfloat16", None) / 1e12, "TFLOP/s")
from slime.training.packed_layout import PackedLayout
from slime.training.varlen_attention import varlen_attention
q = torch.randn(64, 8, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(64, 2, 32, device="cuda", dtype=torch.bfloat16)
layout = PackedLayout.from_boundaries([0, 9, 64], q.device)
varlen_attention(q, k, k, layout, None, None).sum().backward()
print("varlen_attention", q.grad.norm().item())
PYTHON
}

export -f check pytests trainer loop  # for the shell that timeout starts

for name in "$@"; do
    case $name in
    check) piece check 120 check ;;
    tests) TAIL=40 piece tests 560 pytests tests/gpu/test_trainer.py tests/gpu/test_optimizer_offload.py \
        tests/gpu/test_profiling.py ;;
    engine) TAIL=40 piece engine 300 pytests tests/gpu/test_embedded_engine.py -k "not rollouts" ;;
    loop-test) TAIL=60 piece loop-test 560 pytests tests/gpu/test_embedded_engine.py -k rollouts ;;
    trainer) piece trainer 300 trainer --size 0.6B ;;
    trainer-4B) piece trainer-4B 560 trainer --size 4B --recompute --rows 2 --steps 3 ;;
    loop) piece loop 560 loop --size 0.6B --engine embedded --new-tokens 128 --steps 3 ;;
    sglang-test) TAIL=60 piece sglang-test 580 pytests tests/gpu/test_colocated.py -x ;;
    sglang) piece sglang 580 loop --size 0.6B --engine sglang --steps 20 -- --sglang-mem-fraction-static 0.5 ;;
    *)
        echo "unknown piece: $name" >&2
        exit 2
        ;;
    esac
done
exit $status
