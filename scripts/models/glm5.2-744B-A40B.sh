# GLM-5.2.
source "$(dirname -- "${BASH_SOURCE[0]}")/glm5-744B-A40B.sh"
