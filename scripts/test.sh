#!/usr/bin/env bash
# Lint, types and tests, in the environment that the quickstart uses.
#
#     bash scripts/test.sh                     # everything but what is nightly
#     bash scripts/test.sh --fast              # without the tests that start Ray and the slow ones
#     bash scripts/test.sh --nightly           # the long forms, mutants, flaky tests, fuzzed servers; hours
#     bash scripts/test.sh --flaky [--runs 20] [--load 12] [--at-once 1] [tests...]   # that search alone
#     bash scripts/test.sh tests/utils -x      # lint, types and these tests; arguments go to pytest
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"

# By file, the longest first: what the tests of a module share is made once. One more than there are cores, since
# tests of faults wait for most of their time; each takes some 4 GB.
cores="$(env -u OMP_NUM_THREADS nproc)"
workers=$((cores < 8 ? cores + 1 : 8))
AT_A_TIME=(-n "$workers" --dist loadfile --no-loadscope-reorder)

use_environment dev docs test
share_cores_politely
compute_in_batch
cd "$REPOSITORY"
unset PYTHONDONTWRITEBYTECODE # else each of many processes compiles all of our modules, and pytest rewrites all tests
export NO_MKDOCS_2_WARNING=1 # else Material for MkDocs prints a notice about its own future

run() {
    echo "+ $*"
    "$@"
}

# As long as mypy takes without its cache: it has one of the two cores, the others share the other one.
check() {
    local types status=0
    run mypy &
    types=$!
    { run ruff check . && run ruff format --check . &&
        run shellcheck scripts/*.sh scripts/*/*.sh examples/*/run.sh && run mkdocs build --quiet --strict; } || status=1
    wait "$types" || status=1
    return "$status"
}

case "${1:-}" in
--nightly)
    shift
    run python benchmarks/nightly.py "$@"
    exit
    ;;
--flaky)
    shift
    run python -m tests.flaky "$@"
    exit
    ;;
esac

check
if [[ "${1:-}" == --fast ]]; then
    shift
    run python -m pytest "${AT_A_TIME[@]}" -m "not cluster and not slow" "$@"
elif (($#)); then
    run python -m pytest "$@"
else
    run python -m pytest "${AT_A_TIME[@]}"
fi
