#!/usr/bin/env bash
# What the environment consists of: a bill of materials, the licences, and known weaknesses.
#
#     bash scripts/audit.sh [FOLDER]      # default: build/audit
#
# Writes sbom.json (CycloneDX), licences.md and weaknesses.json there. Ends with status 1 for a licence that is not
# in the list below and for a version with a known weakness; with status 3 if nothing is wrong as far as could be
# seen, but weaknesses could not be asked for: PyPI did not answer, or the index in its place knows of none.
#
# SLIME_VENV        the environment to look at (default: .venv in the repository)
# SLIME_AUDIT_VENV  the one of the tools (default: .venv-audit in the repository)
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
folder="$(mkdir -p "${1:-$REPOSITORY/build/audit}" && cd "${1:-$REPOSITORY/build/audit}" && pwd)"
cd "$REPOSITORY"

# Words of licences that ask for no more than a notice, or for changes of their own files.
allowed="Apache;BSD;MIT;ISC;PSF;Python Software Foundation;MPL;Mozilla;CC0;Zlib"

looked_at="${SLIME_VENV:-$REPOSITORY/.venv}/bin/python"
[[ -x "$looked_at" ]] || fail "SLIME_VENV: $looked_at is not there (wanted: an environment; scripts/test.sh makes one)"
tools="${SLIME_AUDIT_VENV:-$REPOSITORY/.venv-audit}"
[[ -x "$tools/bin/python" ]] || "$(find_python)" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
    "cyclonedx-bom>=6,<8" "pip-audit>=2.8,<3" "pip-licenses>=5,<6"

status=0
"$tools/bin/cyclonedx-py" environment "$looked_at" --pyproject pyproject.toml --output-file "$folder/sbom.json"
"$tools/bin/pip-licenses" --python "$looked_at" --from=mixed --format=markdown --output-file "$folder/licences.md"
# The second look finds what one of several licences of a package asks for.
for limit in "--allow-only=$allowed" "--fail-on=GPL"; do
    "$tools/bin/pip-licenses" --python "$looked_at" --from=mixed --partial-match "$limit" >/dev/null || status=1
done
rm -f "$folder/weaknesses.json"
asked=0
"$tools/bin/pip-audit" --requirement constraints/cpu.lock --disable-pip --require-hashes --progress-spinner off \
    --format json --output "$folder/weaknesses.json" || asked=$?
weak=0
"$looked_at" - "$folder/weaknesses.json" "$asked" <<'PYTHON' || weak=$?
import json
import sys
from pathlib import Path

file, status = Path(sys.argv[1]), int(sys.argv[2])
packages = json.loads(file.read_text())["dependencies"] if file.is_file() else []
known = [package for package in packages if "skip_reason" not in package]
weak = [f"{one['name']} {one['version']}" for one in known if one["vulns"]]
print(f"weaknesses: {len(known)} of {len(packages)} packages looked up; PyPI does not know the versions of the others")
if weak:
    print(f"weaknesses: {', '.join(weak)}")
elif status or not known:
    why = f"pip-audit ended with status {status}" if status else "PyPI, or the index in its place, knows none of the versions"
    print(f"weaknesses: could not be asked for: {why}", file=sys.stderr)
sys.exit(1 if weak else 3 if status or not known else 0)
PYTHON
[[ "$status" != 0 ]] || status="$weak"
echo "written to $folder"
exit "$status"
