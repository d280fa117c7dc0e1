# GLM-5.2: the sizes of GLM-5. Which layers share an indexer is in config.json alone.
source "$(dirname -- "${BASH_SOURCE[0]}")/glm5-744B-A40B.sh"
