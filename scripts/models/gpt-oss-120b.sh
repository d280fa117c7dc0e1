# gpt-oss-120b: more layers and experts than gpt-oss-20b.
MODEL_ARGS_NUM_LAYERS=36
MODEL_ARGS_NUM_EXPERTS=128
source "$(dirname -- "${BASH_SOURCE[0]}")/gpt-oss-20b.sh"
