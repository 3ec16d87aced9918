# Bloomery for one AMD chip. The wheel brings AMD's user space with it: the host needs the amdgpu driver and nothing else.
#
# Which chip: PYTHONPATH=src python3 -m bloomery.hw.torch_install   (or: cat /sys/class/kfd/kfd/topology/nodes/*/properties)
#
# docker build -f containers/rocm.Dockerfile --build-arg TARGET=gfx1151 -t bloomery-rocm .
# docker run -it --rm --device=/dev/kfd --device=/dev/dri --group-add "$(stat -c %g /dev/kfd)" --group-add video --ipc=host --security-opt seccomp=unconfined -v "$PWD:$PWD" -w "$PWD" bloomery-rocm doctor
#
# The group is given as a number, because the image may lack a group of that name or have it under another number.

# containers/run does both: it reads the chip, and keeps the cache.

FROM python:3.12-slim

ARG TARGET=gfx1151
ENV PYTHONUNBUFFERED=1

# A C++ compiler for the compiled library and for torch.compile, git for the versions in manifests.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# torch alone comes from AMD's index, which refuses to be asked for packages that it does not have.
RUN python -m pip install --no-cache-dir --index-url https://repo.amd.com/rocm/whl-multi-arch/ "torch[device-${TARGET}]>=2.11,<2.14"

WORKDIR /bloomery
COPY . .
RUN python -m pip install --no-cache-dir '.[data]'

ENTRYPOINT ["bloomery"]
CMD ["doctor"]
