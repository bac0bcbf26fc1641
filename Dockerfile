# Pellucid as an image: the server with torch for the CPU, or for CUDA with --build-arg TORCH_INDEX= (docs/container.md).
#
#   BASE            a Debian or Ubuntu image with Python 3.11 or newer among its packages
#   TORCH_INDEX     the package index that torch comes from beside pip's own; empty: pip's own alone, the CUDA build
#   PIP_FIND_LINKS, PIP_INDEX_URL, PIP_CERT   pip's own settings, for builds behind a mirror or a proxy

ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
# Versions of Debian's packages come with BASE.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-pip \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build

# A stage of its own, so that an edit of pyproject.toml elsewhere than in its dependencies installs nothing again.
FROM python AS requirements
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["server"], sep="\n")' > requirements.txt

# Everything Pellucid needs and nothing of it: a large layer that stays the same from version to version.
FROM python AS dependencies
COPY --from=requirements /build/requirements.txt ./
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_FIND_LINKS
ARG PIP_INDEX_URL
ARG PIP_CERT
# torch's headers and its own tests are of no use without a compiler.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca \
    python3 -m venv --without-pip /opt/pellucid \
    && python3 -m pip --python /opt/pellucid/bin/python install ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
        --constraint constraints.txt --requirement requirements.txt \
    && rm -rf /opt/pellucid/lib/python3*/site-packages/torch/include /opt/pellucid/lib/python3*/site-packages/torch/test

# Pellucid itself, with its kernels compiled for every CPU of this architecture.
FROM python AS package
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . .
ARG PIP_FIND_LINKS
ARG PIP_INDEX_URL
ARG PIP_CERT
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca \
    python3 -m venv --without-pip /opt/pellucid \
    && python3 -m pip --python /opt/pellucid/bin/python wheel --no-deps --wheel-dir /wheels . \
    && python3 -m pip --python /opt/pellucid/bin/python install --no-deps --no-index --prefix /package /wheels/pellucid-*.whl \
    && test -e /package/lib/python3*/site-packages/pellucid_model/kernels/_kernels_portable.so

FROM ${BASE} AS server
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libstdc++6 python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pellucid
COPY --from=dependencies /opt/pellucid /opt/pellucid
COPY --from=package /package /opt/pellucid

# A user without an entry in /etc/passwd works too, hence HOME and USER. Nothing is written outside /tmp.
ENV PATH=/opt/pellucid/bin:$PATH \
    HOME=/tmp \
    USER=pellucid \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PELLUCID_LISTEN=0.0.0.0:50051 \
    PELLUCID_METRICS_LISTEN=0.0.0.0:9464
USER 10001
VOLUME /models
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["pellucid", "health", "--timeout", "4"]
# tini is PID 1: it hands signals on and reaps what others leave behind.
ENTRYPOINT ["tini", "--", "pellucid"]
CMD ["serve"]

# What it was built from, for its labels and for pellucid_build_info.
ARG VERSION=unversioned
ARG REVISION=unknown
ENV PELLUCID_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="Pellucid" \
      org.opencontainers.image.description="A see-through inference server for Transformers you trained yourself" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
