"""What torch was built for and what it sees. Nothing is computed."""

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import is_rocm
from bloomery.hw.probe.compare import say

import torch


def torch_itself() -> None:
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = [torch.cuda.get_device_properties(number) for number in range(seen)]
    say(
        version=torch.__version__,
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        gpus=seen,
        names=[one.name for one in facts],
        chips=[one.gcnArchName if is_rocm() else f"sm_{one.major}{one.minor}" for one in facts],
        targets=sorted({name.partition(":")[0] for name in torch.cuda.get_arch_list()}),
        apple=torch.backends.mps.is_available(),
    )
