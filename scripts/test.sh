#!/usr/bin/env bash
# Lint, types and tests, in the environment that the quickstart uses.
#
#     bash scripts/test.sh                     # everything
#     bash scripts/test.sh --fast              # without the tests that start Ray and the slow ones, two at a time
#     bash scripts/test.sh tests/utils -x      # lint, types and these tests; arguments go to pytest
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"

# By file: what the tests of a module share is made once.
TWO_AT_A_TIME=(-n 2 --dist loadfile)
if [[ "${1:-}" == --fast ]]; then
    shift
    set -- "${TWO_AT_A_TIME[@]}" -m "not cluster and not slow" "$@"
fi

use_environment dev docs test
share_cores_politely
cd "$REPOSITORY"
export NO_MKDOCS_2_WARNING=1 # else Material for MkDocs prints a notice about its own future

run() {
    echo "+ $*"
    "$@"
}

run ruff check .
run ruff format --check .
run mypy
run shellcheck scripts/*.sh scripts/*/*.sh examples/*/run.sh
run mkdocs build --quiet --strict
if (($#)); then
    run python -m pytest "$@"
else
    run python -m pytest "${TWO_AT_A_TIME[@]}" -m "not cluster"
    run python -m pytest -m cluster
fi
