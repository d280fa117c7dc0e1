#!/usr/bin/env bash
# The conformance tests of the engine protocol, against the embedded engine and against a real SGLang.
#
#     bash scripts/conformance.sh                           # the embedded engine alone
#     bash scripts/conformance.sh http://127.0.0.1:30000    # and the SGLang at this address
#     bash scripts/conformance.sh http://127.0.0.1:30000 -x # more arguments go to pytest
#
# That SGLang has to serve a small float32 checkpoint directory of this machine, without an API key; tests of
# adapters are skipped if it was started without --enable-lora --max-lora-rank 4 --lora-target-modules all. On a CPU
# it takes about 20 s to tell that it is unhealthy behind a pause, so its tests take some minutes.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
use_environment dev test
share_cores_politely
cd "$REPOSITORY"

if [[ "${1:-}" == http* ]]; then
    export SLIME_CONFORMANCE_URL=$1
    shift
fi
exec python -m pytest -o timeout=300 tests/backends/sglang_utils/test_conformance.py \
    tests/backends/sglang_utils/test_conformance_control.py tests/backends/sglang_utils/test_conformance_openai.py \
    tests/backends/sglang_utils/test_conformance_edges.py tests/backends/sglang_utils/test_conformance_adapters.py \
    tests/backends/sglang_utils/test_comparison.py "$@"
