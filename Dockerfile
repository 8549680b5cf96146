# Images of the operator and of the workers.
#
#   docker build --target operator          -t rollout-operator  .
#   docker build --target worker-hf         -t rollout-worker-hf .          # GPUs and CPUs
#   docker build --target worker-vllm       -t rollout-worker-vllm .        # GPUs
#   docker build --target worker-vllm-cpu   -t rollout-worker-vllm-cpu .
#   docker build --target worker-sglang     -t rollout-worker-sglang .      # GPUs
#   docker build --target worker-sglang-cpu -t rollout-worker-sglang-cpu .
#   docker build --target worker            -t rollout-worker .             # leaves the engine out
#
# BASE_IMAGE: any image of Debian or Ubuntu with Python 3.11 or later and its venv module.
# ENGINE_SITE_PACKAGES: for `worker`, a folder mounted at run time, in which it finds the engine.
#
# To use your own package index or certificate authority, pass pip's configuration as a secret:
# `--secret id=pip.conf,src=pip.conf --secret id=ca.pem,src=ca.pem` (`cert = /run/secrets/ca.pem`).
# Secrets are only mounted while packages are installed, and end up in no layer.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS python
# Writes go to mounted volumes and /tmp only: the root file system is read-only. No name belongs to the
# user id; libraries ask for one, and fail without.
ENV PATH=/opt/rollout/bin:$PATH \
    HOME=/tmp \
    USER=rollout \
    LOGNAME=rollout \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
RUN python3 -m venv /opt/rollout

# Our own code, laid out to be copied over the environment with the dependencies. It is copied last,
# so that changing it does not reinstall anything else.
FROM python AS code
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    pip install --no-cache-dir --only-binary :all: "hatchling>=1.27,<2" "ziglang>=0.15,<0.18"
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY worker worker
COPY client client
COPY common common
COPY hack/hatch_build.py hack/
RUN pip install --no-deps --no-build-isolation --no-index --prefix /code .

FROM python AS operator
COPY requirements/operator.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh
COPY --from=code /code /opt/rollout
USER 65532:65532
ENTRYPOINT ["rollout-operator"]

# Without an engine: it is found in a mounted environment, as a site folder of its own, so that its
# *.pth files take effect. The image's packages come first on the path; a missing folder is ignored.
FROM python AS worker
COPY requirements/worker.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh
ARG ENGINE_SITE_PACKAGES=
RUN if [ -n "$ENGINE_SITE_PACKAGES" ]; then \
      echo "import site; site.addsitedir('$ENGINE_SITE_PACKAGES')" \
        >"$(echo /opt/rollout/lib/python3.*/site-packages)/engine.pth"; \
    fi
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]

# What engines need of the system: compilers, since Triton, torch and nvcc compile while they run,
# with the headers of this Python, and libnuma. Skipped where the base has them.
FROM python AS engine
RUN packages=; \
    command -v g++ >/dev/null || packages="gcc g++ libc6-dev"; \
    ldconfig -p | grep -q libnuma.so.1 || packages="$packages libnuma1"; \
    [ -f "$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("INCLUDEPY"))')/Python.h" ] \
      || packages="$packages libpython3-dev"; \
    if [ -n "$packages" ]; then \
      apt-get update && apt-get install -y --no-install-recommends $packages && \
      rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/* /usr/share/doc /usr/share/man \
        /usr/lib/*/libpython3*.a /usr/lib/python3*/config-*/*.a; \
    fi
# What the runtime class hands in of the driver, and where clusters without one mount it.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64

FROM engine AS worker-hf
COPY requirements/hf.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]

# Requirements of vLLM and SGLang are complete, and pip must not resolve dependencies: some builds
# ask for a torch that not every index has. Processes share memory: run with --shm-size=1g or more.
FROM engine AS worker-vllm
COPY requirements/vllm.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh --no-deps
ENV CUDA_HOME=/usr/local/cuda
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]

FROM engine AS worker-vllm-cpu
COPY requirements/vllm-cpu.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh --no-deps
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]

FROM engine AS worker-sglang
COPY requirements/sglang.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh --no-deps
ENV CUDA_HOME=/usr/local/cuda
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]

# With stand-ins for the kernels, which no other image contains.
FROM engine AS worker-sglang-cpu
COPY requirements/sglang-cpu.txt /opt/rollout/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    --mount=type=bind,source=hack/image,target=/install \
    sh /install/install.sh --no-deps
RUN --mount=type=bind,source=hack/sglang_cpu,target=/stand-ins \
    site="$(echo /opt/rollout/lib/python3.*/site-packages)"; \
    cp /stand-ins/*.py "$site" && echo "import sglang_cpu" >"$site/sglang_cpu.pth"
COPY --from=code /code /opt/rollout
USER 65532:65532
EXPOSE 8000 8001 8002
ENTRYPOINT ["rollout-worker"]
