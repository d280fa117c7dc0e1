# MiMo-7B-RL.
MODEL_ARGS=(
    --mtp-num-layers 1
)
