# Llama-3.2-3B-Instruct on AMD GPUs.
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
