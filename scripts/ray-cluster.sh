#!/usr/bin/env bash
# Runs a command on a Ray cluster of several nodes, which is there as long as the command runs.
#
#     bash scripts/ray-cluster.sh ADDRESS NODE... -- bash scripts/run-deepseek-r1.sh
#
# ADDRESS is this machine's, as the other nodes reach it; each NODE is one that `ssh NODE` logs in to without asking.
# Repository, environment, models and data are under the same paths on all of them.
#
# RAY_PORT       of the cluster (default 6379)
# JOIN_TIMEOUT   seconds for all nodes to join (default 300)
#
# Nodes without the token of this run, which no command line shows, are refused. What was started here ends with it;
# other Ray processes of these machines are left alone.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

[[ $# -gt 0 ]] || fail "wanted: ray-cluster.sh ADDRESS NODE... -- COMMAND"
address="$1" nodes=()
shift
while [[ $# -gt 0 && "$1" != -- ]]; do
    nodes+=("$1")
    shift
done
[[ ${#nodes[@]} -gt 0 && $# -gt 1 ]] || fail "wanted: ray-cluster.sh ADDRESS NODE... -- COMMAND"
shift
[[ -n "${VIRTUAL_ENV:-}" ]] || fail "no environment is active (wanted: . .venv-gpu/bin/activate)"

export RAY_ADDRESS="$address:${RAY_PORT:-6379}" RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
started=()
end_all() {
    kill "${started[@]}" 2>/dev/null || true
    wait "${started[@]}" 2>/dev/null || true
}
trap end_all EXIT

# The dashboard stays on loopback, which is Ray's default.
env -u RAY_ADDRESS ray start --head --block --node-ip-address "$address" --port "${RAY_PORT:-6379}" >&2 &
started+=($!)

# On a node: the first line of standard input is the token; when the input ends, so does Ray. Without a line break,
# since %q would quote that in a way that not every login shell knows.
join="$(printf 'cd %q && source %q && read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN RAY_AUTH_MODE=token || exit 1; ' \
    "$REPOSITORY" "$VIRTUAL_ENV/bin/activate")"
join+="ray start --block --address $RAY_ADDRESS </dev/null & ray=\$!; cat >/dev/null; kill \$ray; wait \$ray"
for node in "${nodes[@]}"; do
    exec {input}> >(exec ssh -o BatchMode=yes -- "$node" "bash -c $(printf %q "$join")" >&2)
    started+=($!)
    printf '%s\n' "$RAY_AUTH_TOKEN" >&"$input"
done

python "$REPOSITORY/tools/wait_for_ray_nodes.py" --nodes "$((${#nodes[@]} + 1))" --timeout "${JOIN_TIMEOUT:-300}"
"$@"
