# gpt-oss-120b.
source "$(dirname -- "${BASH_SOURCE[0]}")/gpt-oss-20b.sh"
