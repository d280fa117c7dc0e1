# The first 5 layers of DeepSeek-V3.
MODEL_ARGS_NUM_LAYERS=5
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
