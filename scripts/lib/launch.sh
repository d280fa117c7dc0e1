# What the run-*.sh launchers share. Source it from them.
#
# Paths are the caller's: a launcher does not leave the directory that it was started in.

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
: "${MODELS:=/root/models}" "${DATASETS:=/root/datasets}" "${RUNS:=$REPOSITORY/outputs}"

# Processes on other nodes, or of a cluster that was there before, start in other directories.
make_absolute() {
    local name
    for name in "$@"; do
        [[ -z "${!name:-}" || "${!name}" == /* ]] || printf -v "$name" %s "$PWD/${!name}"
    done
}

make_absolute MODELS DATASETS RUNS
# All processes find plug-ins of examples/ by their dotted paths.
export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
source "$REPOSITORY/scripts/lib/recipes.sh"

# Sets MODEL_ARGS from scripts/models/NAME.sh: what the checkpoint's config.json does not say.
use_model() {
    source "$REPOSITORY/scripts/models/$1.sh"
}

fail() {
    echo "error: $*" >&2
    exit 1
}

need_environment() {
    python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' >/dev/null 2>&1 ||
        fail "no environment is active: found $(command -v python || echo no python)," \
            "wanted one with what slime needs (. .venv/bin/activate)"
}

# Runs train.py on this machine, or on the cluster that RAY_ADDRESS names (scripts/ray-cluster.sh makes one of several
# nodes). A cluster that is too small for the flags is refused at once.
launch() {
    need_environment
    export PYTHONUNBUFFERED=1
    exec python "$REPOSITORY/train.py" "$@"
}
