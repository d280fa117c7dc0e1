# Gemma 3 270M.
MODEL_ARGS=()
