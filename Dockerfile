# Headway in a container. PyPI's torch brings its CUDA libraries; the host needs the NVIDIA driver and the
# container toolkit. For a smaller image without CUDA let pip find PyTorch's CPU build:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu -t headway .

# Debian or a descendant with Python 3.11 or later, its venv module and its headers.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# pip reads these from the environment: a further index, a folder of wheels, certificates of a proxy.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /build
# What the package needs changes rarely: a layer of its own.
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/headway \
    && /opt/headway/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['otel'], sep='\n')" > requirements.txt \
    && /opt/headway/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY README.md CHANGELOG.md LICENSE ./
COPY docs/ docs/
COPY src/ src/
COPY server/ server/
COPY engine/ engine/
COPY kernels/ kernels/
RUN /opt/headway/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
# Triton compiles its launcher with a C compiler when a GPU is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --no-log-init --uid 10001 --create-home --home-dir /var/lib/headway headway \
    && mkdir /models
COPY --from=build /opt/headway /opt/headway
ENV PATH=/opt/headway/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/lib/headway/huggingface \
    TRITON_CACHE_DIR=/var/lib/headway/triton \
    HEADWAY_HOST=0.0.0.0 \
    HEADWAY_PORT=8000
USER 10001:10001
WORKDIR /var/lib/headway
EXPOSE 8000
# Alive is enough: while a model loads /health answers 200, and says how far it is.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:%s/health' % os.environ['HEADWAY_PORT'], timeout=4)"]
# The first start on a GPU compiles kernels into TRITON_CACHE_DIR. An image derived from this one compiles nothing at its start
# if it is built where a GPU of the serving kind is visible, with: RUN headway warmup MODEL and the options of serve.
ENTRYPOINT ["headway"]
CMD ["serve"]
