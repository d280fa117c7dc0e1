# What the run-*.sh launchers share. Source it from them.

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
: "${MODELS:=/root/models}" "${DATASETS:=/root/datasets}" "${RUNS:=$REPOSITORY/outputs}"
source "$REPOSITORY/scripts/lib/recipes.sh"

# Sets MODEL_ARGS from scripts/models/NAME.sh. The shape is in the checkpoint's config.json as well; giving
# it here makes a wrong checkpoint an error before any GPU is taken.
use_model() {
    source "$REPOSITORY/scripts/models/$1.sh"
}

# Runs train.py on this machine, or on the cluster that RAY_ADDRESS names (scripts/ray-cluster.sh makes one of several
# nodes). A cluster that is too small for the flags is refused at once.
launch() {
    cd "$REPOSITORY" || exit
    export PYTHONUNBUFFERED=1
    exec python train.py "$@"
}
