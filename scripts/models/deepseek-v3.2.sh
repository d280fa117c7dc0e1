# DeepSeek-V3.2: DeepSeek-V3 with indexers. A run needs --freeze-indexer.
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
