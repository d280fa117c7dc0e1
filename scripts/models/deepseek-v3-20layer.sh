# The first 20 layers of DeepSeek-V3, which its config.json counts.
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
