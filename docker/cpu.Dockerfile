# The command `slime` without a GPU, under constraints/cpu.txt. Build it in the repository's root:
#
#     docker build -f docker/cpu.Dockerfile -t slime:cpu .
#
# Docker copies no git data: --build-arg VERSION=0.1.0 names the version.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
ARG VERSION=0.1.0.dev0
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY slime slime
COPY slime_plugins slime_plugins
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLIME="$VERSION" pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON}-slim
COPY constraints/cpu.txt /opt/slime/
COPY --from=wheel /dist /opt/slime/
# PyPI's torch brings 4 GB of CUDA. xgrammar asks for triton, which computes nothing on a CPU.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        -c /opt/slime/cpu.txt /opt/slime/*.whl \
    && pip install --no-cache-dir --no-deps -c /opt/slime/cpu.txt apache-tvm-ffi xgrammar
RUN useradd --create-home slime && mkdir /work && chown slime /work
USER slime
# A name for whoever is given by --user, whom the image does not know.
ENV USER=slime
WORKDIR /work
RUN slime --version
ENTRYPOINT ["slime"]
CMD ["--help"]
