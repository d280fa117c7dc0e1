"""Files of weights: safetensors, how their weights are quantised, and reading parts of them."""
