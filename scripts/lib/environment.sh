# Makes and enters the Python environment. Source it, then call `use_environment EXTRA...`.
#
# SLIME_VENV   where it is (default: .venv in the repository)
# SLIME_PYTHON the interpreter to make it with (default: the first of python3.12, python3.11, python3)

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3.12 python3.11 python3)
    [[ -z "${SLIME_PYTHON:-}" ]] || candidates=("$SLIME_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no suitable Python: found ${SLIME_PYTHON:-$(python3 --version 2>/dev/null || echo none)}," \
        "wanted 3.11 or 3.12 with venv and pip (set SLIME_PYTHON to its path)"
}

# What was asked for and installed, so that a second run can tell that nothing has changed.
environment_fingerprint() {
    (cd "$REPOSITORY" && cat pyproject.toml constraints/cpu.txt && echo "$*") | cksum
}

use_environment() {
    local venv="${SLIME_VENV:-$REPOSITORY/.venv}" extras stamp fingerprint python
    [[ "$venv" == /* ]] || venv="$PWD/$venv"
    extras="$(IFS=,; echo "$*")"
    # One stamp per set of extras: running the quickstart after the tests must not install again.
    stamp="$venv/.installed-${extras:-core}"
    fingerprint="$(environment_fingerprint "$extras")"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]]; then
        if [[ ! -x "$venv/bin/python" ]]; then
            python="$(find_python)" || exit 1
            echo "Making the environment $venv with $("$python" --version)"
            "$python" -m venv "$venv"
        fi
        echo "Installing under constraints/cpu.txt. The first time this takes some minutes (about 1 GB)."
        (cd "$REPOSITORY" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c constraints/cpu.txt -e ".${extras:+[$extras]}" &&
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
                -c constraints/cpu.txt --no-deps apache-tvm-ffi xgrammar) # see "grammars" in pyproject.toml
        echo "$fingerprint" >"$stamp"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# Several processes share few cores; OpenMP threads that spin while they wait would starve the others.
share_cores_politely() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    export TOKENIZERS_PARALLELISM=false
}

# Threads that wake put off none that computes, in this shell and in what it starts. Else a thread of gloo puts off
# the one that holds the lock which it then spins for: of ranks' CPU time on a busy machine a fifth.
compute_in_batch() {
    if command -v chrt >/dev/null; then
        chrt --batch --pid 0 $$ 2>/dev/null || true # a sandbox may forbid it
    fi
}
