# gpt-oss-20b, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings,
# MODEL_ARGS_NUM_LAYERS and MODEL_ARGS_NUM_EXPERTS sizes, which are others in the larger one.
MODEL_ARGS=(
    --num-layers "${MODEL_ARGS_NUM_LAYERS:-24}"
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --softmax-type learnable
    --add-bias-linear
    --add-qkv-bias
    --quick-geglu
    --glu-linear-offset 1.0
    --activation-func-clamp-value 7.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rope-type yarn
    --rotary-scaling-factor 32
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-150000}"
    --vocab-size 201088
    --untie-embeddings-and-output-weights
    --num-experts "${MODEL_ARGS_NUM_EXPERTS:-32}"
    --moe-layer-freq "[1]*${MODEL_ARGS_NUM_LAYERS:-24}"
    --moe-ffn-hidden-size 2880
    --moe-router-topk 4
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
    --expert-tensor-parallel-size 1
)
