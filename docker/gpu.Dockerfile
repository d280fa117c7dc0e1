# Trainer and SGLang on GPUs: our wheel in SGLang's own image. Build it in the repository's root:
#
#     docker build -f docker/gpu.Dockerfile -t slime:gpu .
#
# Docker copies no git data: --build-arg VERSION=0.1.0 names the version.
ARG PYTHON=3.12
ARG SGLANG=0.5.23

FROM python:${PYTHON}-slim AS wheel
ARG VERSION=0.1.0.dev0
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY slime slime
COPY slime_plugins slime_plugins
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLIME="$VERSION" pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM lmsysorg/sglang:v${SGLANG}
COPY --from=wheel /dist /opt/slime/
# What the image has stays as it is, torch and its kernels above all: a range of ours that excludes it ends the build.
# The system's Python refuses pip otherwise: nothing else lives in this image.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -m pip list --format=freeze --exclude-editable >/opt/slime/image.txt \
    && python3 -m pip install --no-cache-dir -c /opt/slime/image.txt /opt/slime/*.whl
WORKDIR /work
RUN slime --version && python3 -c "import megatron.core, ray, sglang, torch"
CMD ["bash"]
