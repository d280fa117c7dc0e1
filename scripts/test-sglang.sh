#!/usr/bin/env bash
# Tests against SGLang's own servers, which compute on the CPU here: whole runs, and the conformance tests that
# the embedded engine passes too.
#
#     bash scripts/test-sglang.sh                  # installs SGLang beside us (4 GB), then about 40 minutes
#     bash scripts/test-sglang.sh --runs           # whole runs alone
#     bash scripts/test-sglang.sh -k colocated     # arguments go to pytest
#
# SLIME_SGLANG_VENV  the environment (default: .venv-sglang in the repository)
#
# SGLang publishes no build for CPUs. Its wheel is installed without its pins, which are those of CUDA; what it
# imports and a CPU lacks (kernels, image operators, GPU memory) stands in tests/sglang_cpu/stand_ins.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
cd "$REPOSITORY"

venv="${SLIME_SGLANG_VENV:-$REPOSITORY/.venv-sglang}"
stamp="$venv/.installed-sglang"
fingerprint="$(cat pyproject.toml constraints/sglang_cpu.txt | cksum)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]]; then
    [[ -x "$venv/bin/python" ]] || "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/sglang_cpu.txt
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e .
    echo "$fingerprint" >"$stamp"
fi
# shellcheck disable=SC1091
source "$venv/bin/activate"
share_cores_politely
# One group of cores per logical GPU: SGLang looks its own up by the number of its first GPU.
export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="0|1|0|1|0|1|0|1" HF_HUB_OFFLINE=1
export PYTHONPATH="$REPOSITORY:$REPOSITORY/tests/sglang_cpu/stand_ins"

if [[ "${1:-}" == --runs ]]; then
    shift
    exec python -m pytest -o timeout=900 tests/sglang_cpu "$@"
fi

# A server for the conformance tests; the runs start their own.
work="$(mktemp -d)"
url="http://127.0.0.1:${SLIME_CONFORMANCE_PORT:-31555}" server=
python - "$work/model" <<'PYTHON'
import sys
from pathlib import Path
from tests.engines.embedded import make_checkpoint
make_checkpoint(Path(sys.argv[1]))
PYTHON
trap 'end_server; rm -rf "$work"' EXIT

# serve FLAGS...: starts a server, and returns when it serves.
serve() {
    python -m sglang.launch_server --model-path "$work/model" --host 127.0.0.1 --port "${url##*:}" --dtype float32 \
        --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule \
        --mem-fraction-static 0.9 --max-total-tokens 65536 --disable-cuda-graph --sleep-on-idle "$@" \
        >"$work/server.log" 2>&1 &
    server=$!
    for ((second = 0; ; second++)); do
        curl --silent --fail --output /dev/null "$url/health" && break
        if ((second == 300)) || ! kill -0 "$server" 2>/dev/null; then
            tail -n 20 "$work/server.log" >&2
            fail "SGLang does not serve at $url"
        fi
        sleep 1
    done
}

end_server() {
    [[ -z "$server" ]] && return
    kill "$server" 2>/dev/null || true
    wait "$server" || true
    server=
}

export SLIME_CONFORMANCE_URL="$url"

serve --enable-memory-saver
python -m pytest -o timeout=300 tests/sglang_cpu tests/backends/sglang_utils/test_conformance*.py \
    tests/backends/sglang_utils/test_comparison.py \
    tests/arguments/test_sglang_round_trip.py "$@"
end_server

serve --enable-lora --max-lora-rank 4 --lora-target-modules all --lora-backend torch_native
python -m pytest -o timeout=300 tests/backends/sglang_utils/test_conformance_adapters.py "$@" || (($? == 5)) # none chosen
