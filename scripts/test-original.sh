#!/usr/bin/env bash
# The original's launch scripts and examples, as they are, against this repository.
#
#     ORIGINAL=~/slime-original bash scripts/test-original.sh
#     ORIGINAL=~/slime-original bash scripts/test-original.sh -k retool    # arguments go to pytest
#
# ORIGINAL  a checkout of THUDM/slime. Nothing in it is changed; its scripts run in a copy, with fakes in place of all
#           that they launch, stop or delete. Without it the tests are skipped.
#
# Each launcher's command line goes through the parser, with SGLang's recorded options and with models and data made
# up for it; docs/launch-scripts.md says what is to refuse it. Each example makes a small rollout with an embedded
# engine. One that imports a package which is not installed is skipped by name: install it into .venv and run again.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
[[ -z "${ORIGINAL:-}" || -d "$ORIGINAL/examples" ]] ||
    fail "ORIGINAL: found $ORIGINAL, wanted a checkout of THUDM/slime with its examples/"
use_environment dev docs test # those of test.sh, whose environment it then is
share_cores_politely
export ORIGINAL="${ORIGINAL:+$(cd -- "$ORIGINAL" && pwd)}"
cd "$REPOSITORY"
exec python -m pytest tests/original "$@"
