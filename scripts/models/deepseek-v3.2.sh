# DeepSeek-V3.2, from its config.json: DeepSeek-V3 with indexers. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary
# embeddings. A run needs --freeze-indexer.
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
MODEL_ARGS+=(
    --dsa-indexer-n-heads 64
    --dsa-indexer-head-dim 128
    --dsa-indexer-topk 2048
)
