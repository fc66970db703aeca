# verl-p40: verl on a Tesla P40 (sm_61), and on the CPU. Targets: `train` (the last one, so the
# default) and `monitor` (slim, no torch). docs/docker.md: what is in them, and building elsewhere.
#
# No `# syntax=` line on purpose: it would fetch a front end from Docker Hub at every build, and
# nothing here needs more than the one that engines have had since 20.10.

# Public `docker pull` logs name this digest for the tag (docs/docker.md). NVIDIA deletes old tags:
# mirror the image and set BASE_IMAGE to the mirror.
ARG BASE_IMAGE=nvidia/cuda:11.8.0-base-ubuntu22.04@sha256:f895871972c1c91eb6a896eee68468f40289395a1e58c492e1be7929d0f8703b
# cu118: torch for CUDA 11.8. cpu: torch from the package index, on Python 3.10 or 3.11.
ARG FLAVOR=cu118
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu118
# For the labels; `nox -s lock` writes them, and the build fails when PATCHES_DIGEST is not so.
ARG VERSION=0.1.0
ARG VERL_VERSION=0.4.1
ARG TORCH_VERSION=2.6.0
ARG PATCHES_DIGEST=c48a6e7757a7193d377b61674381bb648833f047bb34bd77352993e670ca02c0
# The commit that is built.
ARG REVISION=""
# 1: vLLM, compiled for VLLM_ARCH, is in the image. 0: it is not; rollout.name=hf needs none. Empty:
# the flavor decides, 1 for cu118 and 0 for cpu.
ARG VLLM=""
ARG VLLM_ARCH=6.1+PTX
# What compiles it: the CUDA 11.8 toolkit and g++ 11, which Ubuntu 22.04 has as g++. The digest is
# the one that public lock files name for the tag (docs/vllm.md).
ARG VLLM_BASE_IMAGE=nvidia/cuda:11.8.0-devel-ubuntu22.04@sha256:94fd755736cb58979173d491504f0b573247b1745250249415b07fefc738e41f
ARG VLLM_BUILD_PACKAGES="g++-11"

# --- base: what both targets start from ----------------------------------------------------
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
# The distribution's own Python: 3.10 on Ubuntu 22.04, 3.11 on Debian 12.
# hadolint ignore=DL3008
RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -qq --no-install-recommends ca-certificates python3 tini >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log /var/log/apt
# Group 0 and folders that it may write: whatever its uid, a process with group 0 can use them.
RUN useradd --uid 1000 --gid 0 --no-log-init --no-create-home --home-dir /home/verl verl \
 && install -d -m 2775 -o verl -g root /home/verl /cache /data /models /runs
ENV PATH=/opt/verl-p40/bin:$PATH \
    HOME=/home/verl \
    USER=verl \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    VERL_P40_RUNS=/runs \
    VERL_P40_DATA=/data \
    VERL_P40_MODELS=/models \
    VERL_P40_HOME=/cache/verl-p40 \
    HF_HOME=/cache/huggingface
WORKDIR /home/verl
ENTRYPOINT ["/usr/bin/tini", "--"]

# --- builder: uv, by hash, and what else only a build needs ---------------------------------
FROM base AS builder
# hadolint ignore=DL3008,DL3009
RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -qq --no-install-recommends binutils >/dev/null
ARG PYPI_INDEX=""
ENV PYPI_INDEX=${PYPI_INDEX}
COPY scripts/bootstrap.py scripts/image_build.py /build/scripts/
COPY locks/bootstrap.txt /build/locks/
RUN --mount=type=secret,id=ca \
    python3 /build/scripts/image_build.py uv /usr/local/bin/uv

FROM builder AS stack-lock
ARG FLAVOR
COPY locks/train-${FLAVOR}.txt locks/train-cpu.txt /build/locks/

# --- stack: torch, ray and the rest, by hash; everything of the lock but verl ---------------
# Most of the image. TRITON is another version than the lock's: 3.2.0, for vLLM's prefix caching
# (docs/vllm.md). The layer changes with the lock alone, so an edit of a patch or of our code
# neither builds nor pulls it again. The builder is mounted, not a parent: nothing of it stays.
FROM base AS stack
ARG FLAVOR
ARG PYPI_INDEX=""
ARG TORCH_INDEX
ARG TRITON=""
RUN --mount=type=bind,from=stack-lock,target=/builder \
    --mount=type=secret,id=ca --mount=type=cache,target=/var/cache/uv \
    python3 /builder/build/scripts/image_build.py install /opt/verl-p40 \
      train-${FLAVOR}.txt --without uv verl \
 && python3 /builder/build/scripts/image_build.py triton /opt/verl-p40 "${TRITON}" \
 && python3 /builder/build/scripts/image_build.py slim /opt/verl-p40/lib/python3.*/site-packages

# --- vllm-wheel: vLLM, by hash, patched, compiled --------------------------------------------
# Half an hour on two cores, so it depends on nothing but what goes into it. Killed, it goes on
# from the cache mount. `docker build --target vllm-dist --output dist .` gives the wheel alone.
# hadolint ignore=DL3006
FROM ${VLLM_BASE_IMAGE} AS vllm-builder
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
ARG VLLM_BUILD_PACKAGES
# hadolint ignore=DL3008,SC2086
RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -qq --no-install-recommends ca-certificates python3 python3-dev \
      ${VLLM_BUILD_PACKAGES} >/dev/null \
 && rm -rf /var/lib/apt/lists/*
ARG PYPI_INDEX=""
ENV PYPI_INDEX=${PYPI_INDEX}
COPY scripts/bootstrap.py scripts/image_build.py /build/scripts/
COPY locks/bootstrap.txt /build/locks/
RUN --mount=type=secret,id=ca \
    python3 /build/scripts/image_build.py uv /usr/local/bin/uv
ARG FLAVOR
ARG TORCH_INDEX
COPY locks/train-${FLAVOR}.txt locks/tool.txt /build/locks/
# torch and what it loads, with the headers that the image goes without.
RUN --mount=type=secret,id=ca --mount=type=cache,target=/var/cache/uv \
    python3 /build/scripts/image_build.py install /opt/torch train-${FLAVOR}.txt --only torch \
      'nvidia-*' filelock fsspec jinja2 markupsafe mpmath networkx numpy setuptools sympy \
      typing-extensions \
 && python3 /build/scripts/image_build.py install /opt/tool tool.txt

FROM vllm-builder AS vllm-wheel
COPY scripts/vllm_wheel.py /build/scripts/
COPY locks/vllm-build.txt /build/locks/
COPY patches/vllm /build/patches/vllm
COPY src/verl_p40/__init__.py src/verl_p40/errors.py /build/src/verl_p40/
COPY src/verl_p40/hardware /build/src/verl_p40/hardware
COPY src/verl_p40/kernels /build/src/verl_p40/kernels
COPY src/verl_p40/patches /build/src/verl_p40/patches
COPY src/verl_p40/stack /build/src/verl_p40/stack
COPY src/verl_p40/wheel /build/src/verl_p40/wheel
ARG VLLM_ARCH
RUN --mount=type=secret,id=ca \
    --mount=type=cache,target=/var/cache/vllm,sharing=locked \
    --mount=type=cache,target=/cache/verl-p40 \
    VERL_P40_HOME=/cache/verl-p40 \
    python3 /build/scripts/image_build.py run /opt/tool/bin/python /build/scripts/vllm_wheel.py \
      /opt/torch/bin/python /var/cache/vllm /dist "${VLLM_ARCH}"

FROM scratch AS vllm-dist
COPY --from=vllm-wheel /dist/ /

FROM stack-lock AS vllm-lock
ARG FLAVOR
COPY locks/vllm-${FLAVOR}.txt /build/locks/

FROM stack AS runtime-0
FROM runtime-0 AS runtime-cpu

FROM stack AS runtime-1
ARG FLAVOR
ARG PYPI_INDEX=""
RUN --mount=type=bind,from=vllm-lock,target=/builder \
    --mount=type=secret,id=ca --mount=type=cache,target=/var/cache/uv \
    python3 /builder/build/scripts/image_build.py install /opt/verl-p40 vllm-${FLAVOR}.txt
RUN --mount=type=bind,from=builder,target=/builder \
    --mount=type=bind,from=vllm-wheel,source=/dist,target=/dist \
    /builder/usr/local/bin/uv pip install --quiet --offline --no-deps --no-cache \
      --link-mode copy --compile-bytecode --python /opt/verl-p40/bin/python /dist/vllm-*.whl \
 && rm -f /opt/verl-p40/.lock

FROM runtime-1 AS runtime-cu118

# hadolint ignore=DL3006
FROM runtime-${VLLM:-${FLAVOR}} AS runtime

# --- light: the command without torch, and the wheel of our package ------------------------
FROM builder AS light
COPY locks/tool.txt /build/locks/
RUN --mount=type=secret,id=ca --mount=type=cache,target=/var/cache/uv \
    python3 /build/scripts/image_build.py install /opt/verl-p40 tool.txt
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY patches /src/patches
COPY locks /src/locks
RUN uv build --quiet --offline --no-cache --wheel --no-build-isolation --python /opt/verl-p40/bin/python \
      --out-dir /dist /src

# --- patched: verl, by hash, with our queue; verified and audited ---------------------------
FROM runtime AS patched
ARG FLAVOR
ARG PYPI_INDEX=""
ENV PATH=$PATH:/builder/usr/local/bin
RUN --mount=type=bind,from=stack-lock,target=/builder \
    --mount=type=secret,id=ca --mount=type=cache,target=/var/cache/uv \
    python3 /builder/build/scripts/image_build.py install /opt/verl-p40 \
      train-${FLAVOR}.txt --only verl
RUN --mount=type=bind,from=light,target=/builder \
    uv pip install --quiet --offline --no-deps --no-cache --link-mode copy --compile-bytecode \
      --python /opt/verl-p40/bin/python /builder/dist/*.whl
# A queue that does not apply to the byte, or an audit of verl that finds something, ends the build.
RUN --mount=type=bind,from=builder,target=/builder \
    --mount=type=secret,id=ca --mount=type=cache,target=/cache/verl-p40 \
    python3 /builder/build/scripts/image_build.py run verl-p40 patches verify \
 && verl-p40 patches apply /opt/verl-p40/lib/python3.*/site-packages \
 && verl-p40 audit /opt/verl-p40/lib/python3.*/site-packages/verl
ARG BASE_IMAGE
ARG PATCHES_DIGEST
ARG REVISION
# What changes with our code, gathered for one COPY.
WORKDIR /
RUN python3 -m compileall -q -j 0 /opt/verl-p40/lib/python3.*/site-packages/verl \
 && /opt/verl-p40/bin/python -m verl_p40.stack.contents /opt/verl-p40 --target train \
      --flavor "${FLAVOR}" --base-image "${BASE_IMAGE}" --revision "${REVISION}" \
      --patches-digest "${PATCHES_DIGEST}" \
 && mkdir /out \
 && cp -a --parents opt/verl-p40/*.json opt/verl-p40/bin/verl-p40 \
      opt/verl-p40/lib/python3.*/site-packages/verl \
      opt/verl-p40/lib/python3.*/site-packages/verl-* \
      opt/verl-p40/lib/python3.*/site-packages/verl_p40* /out

# --- monitor: samples and shows a run; no torch, no verl ------------------------------------
FROM light AS monitor-env
# What built things is not needed to run them.
RUN /usr/local/bin/uv pip uninstall --quiet --python /opt/verl-p40/bin/python \
      editables hatchling pathspec pluggy setuptools trove-classifiers uv \
 && /usr/local/bin/uv pip install --quiet --offline --no-deps --no-cache --compile-bytecode \
      --python /opt/verl-p40/bin/python /dist/*.whl
ARG FLAVOR
ARG BASE_IMAGE
ARG PATCHES_DIGEST
ARG REVISION
RUN /opt/verl-p40/bin/python -m verl_p40.stack.contents /opt/verl-p40 --target monitor \
      --flavor "${FLAVOR}" --base-image "${BASE_IMAGE}" --revision "${REVISION}" \
      --patches-digest "${PATCHES_DIGEST}"

FROM base AS monitor
# It may share the host's process ids (`pid: host`), where tini is not process 1: -s is for that.
ENTRYPOINT ["/usr/bin/tini", "-s", "--"]
COPY --from=monitor-env /opt/verl-p40 /opt/verl-p40
COPY --chmod=755 scripts/service.py /opt/verl-p40/bin/service
ARG BASE_IMAGE
ARG REVISION
ARG VERSION
LABEL org.opencontainers.image.title="verl-p40 monitor" \
      org.opencontainers.image.description="Samples GPU and host into the folder of a verl-p40 run" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      io.verl-p40.target="monitor"
USER 1000:0
CMD ["service", "monitor"]

# --- train ---------------------------------------------------------------------------------
FROM runtime AS train
# Triton compiles a launcher in C for each kernel that it starts on a GPU.
ARG RUNTIME_PACKAGES="gcc libc6-dev python3-dev"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "${RUNTIME_PACKAGES}" ]; then \
      export DEBIAN_FRONTEND=noninteractive \
      && apt-get update -qq \
      && apt-get install -qq --no-install-recommends ${RUNTIME_PACKAGES} >/dev/null \
      && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log /var/log/apt; \
    fi
COPY --from=patched /out/ /
COPY --chmod=755 scripts/service.py /opt/verl-p40/bin/service
# A mirror of the Hugging Face hub, for every container of this image.
ARG HF_ENDPOINT=https://huggingface.co
ARG FLAVOR
ARG BASE_IMAGE
ARG REVISION
ARG VERSION
ARG VERL_VERSION
ARG TORCH_VERSION
ARG PATCHES_DIGEST
ENV HF_ENDPOINT=${HF_ENDPOINT} \
    VERL_P40_ENV=/opt/verl-p40
LABEL org.opencontainers.image.title="verl-p40" \
      org.opencontainers.image.description="verl (PPO, GRPO) on a Tesla P40 and other pre-Ampere cards" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      io.verl-p40.target="train" \
      io.verl-p40.flavor="${FLAVOR}" \
      io.verl-p40.verl="${VERL_VERSION}" \
      io.verl-p40.torch="${TORCH_VERSION}" \
      io.verl-p40.patches-digest="${PATCHES_DIGEST}"
USER 1000:0
CMD ["service", "train"]
