"""
`python -m bloomery.hw.probe NAME` asks one thing of torch and tells the answers as lines of JSON, each written as soon
as it is known, so that a crash tells what it did not reach.
"""

import sys

from bloomery.hw.probe import block, describe, kernels, memory, speed, together, training

PROBES = {
    "torch": describe.torch_itself,
    "launch": kernels.launch,
    "matmul": kernels.matmul,
    "matmul-blas": lambda: kernels.matmul("cublas"),
    "matmul-blaslt": lambda: kernels.matmul("cublaslt"),
    "attention-flash": lambda: kernels.attention("FLASH_ATTENTION"),
    "attention-efficient": lambda: kernels.attention("EFFICIENT_ATTENTION"),
    "attention-cudnn": lambda: kernels.attention("CUDNN_ATTENTION"),
    "attention-math": lambda: kernels.attention("MATH"),
    "rms-norm": kernels.rms_norm,
    "cross-entropy": kernels.cross_entropy,
    "block-compiled": block.compiled,
    "training": training.training,
    "speed": speed.speed,
    "refill": memory.refill,
    "all-reduce": together.all_reduce,
    "all-reduce-rank": together.rank,
}

if __name__ == "__main__":
    PROBES[sys.argv[1]]()
