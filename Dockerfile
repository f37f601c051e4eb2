# syntax=docker/dockerfile:1
# Greenroom on every node of a cluster, also as the image of `ray up` and KubeRay:
#   docker build --target cpu  --tag registry.example.com/greenroom:cpu  .
#   docker build --target cuda --tag registry.example.com/greenroom:cuda .
# No ENTRYPOINT: cluster launchers start `bash` and `ray` in it, people `greenroom`.

FROM python:3.11-bookworm AS base
# libnuma1: for vLLM on a CPU.  rsync: `ray up` copies its files into the container with it.
# Debian keeps one version of a package per release, so a pinned one would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 rsync \
    && rm -rf /var/lib/apt/lists/*
# 1000 is also the first user of a cloud machine, whose files are mounted.
RUN useradd --create-home --uid 1000 --shell /bin/bash greenroom
# `ray up` works in login shells, which set PATH anew.
COPY deploy/docker/path.sh /etc/profile.d/greenroom.sh
# By number, as Kubernetes cannot tell from a name that it is not root.
USER 1000
WORKDIR /home/greenroom
# HOME is written down because `ray up` reads it from the image.
ENV HOME=/home/greenroom \
    PATH=/home/greenroom/venv/bin:$PATH
COPY --chown=1000:1000 . src/
CMD ["greenroom", "--help"]

FROM base AS cpu
# The same as on any machine, but for the tools of the checks: `make -C src test VENV=/home/greenroom/venv` adds them.
RUN --mount=type=cache,target=/home/greenroom/.cache/pip,uid=1000 \
    make --directory src runtime VENV=/home/greenroom/venv
RUN greenroom --help && ray --version

FROM base AS cuda
# All of CUDA but the driver comes with torch; the driver is the host's.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=cache,target=/home/greenroom/.cache/pip,uid=1000 \
    python3.11 -m venv venv \
    && venv/bin/pip install -c src/requirements/cuda.txt './src[cuda]'
RUN greenroom --help && ray --version
