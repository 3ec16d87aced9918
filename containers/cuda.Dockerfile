# Bloomery for NVIDIA's GPUs. The wheel brings CUDA with it: the host needs the driver (580 or newer) and the container toolkit.
#
# docker build -f containers/cuda.Dockerfile -t bloomery-cuda .
# docker run -it --rm --gpus all --ipc=host -v "$PWD:$PWD" -w "$PWD" bloomery-cuda doctor
#
# A driver from 525 on: --build-arg INDEX=https://download.pytorch.org/whl/cu126

# containers/run does both, and keeps the cache.

FROM python:3.12-slim

ARG INDEX=https://download.pytorch.org/whl/cu130
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
