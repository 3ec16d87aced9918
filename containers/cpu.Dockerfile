# Bloomery without a GPU.
#
# docker build -f containers/cpu.Dockerfile -t bloomery-cpu .
# docker run -it --rm --ipc=host -v "$PWD:$PWD" -w "$PWD" bloomery-cpu doctor
#
# containers/run does both, and keeps the cache.

FROM python:3.12-slim

ARG INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1

# A C++ compiler for the compiled library and for torch.compile, git for the versions in manifests.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

RUN python -m pip install --no-cache-dir --index-url "${INDEX}" "torch>=2.11,<2.14"

WORKDIR /bloomery
COPY . .
RUN python -m pip install --no-cache-dir '.[data]'

ENTRYPOINT ["bloomery"]
CMD ["doctor"]
