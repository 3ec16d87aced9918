"""
What the doctor asks of torch, in a process of its own: a broken stack crashes or hangs at its first kernel.

`python -m bloomery.hw.probe torch` imports torch and tells what it sees. `… compute` multiplies matrices and trains a
small model on the device, because there are GPUs whose forward pass is right and whose gradients are not.
Each answer is one line of JSON, written as soon as it is known, so that a crash tells what it did not reach.
"""

import json
import sys

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device, find, is_rocm

import torch
from torch import nn
from torch.nn import functional

STEPS = 60
SIZE = 256


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def describe() -> None:
    """What torch was built for and which GPUs it sees."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(
        version=torch.__version__,
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        gpus=seen,
        chips=[getattr(torch.cuda.get_device_properties(n), "gcnArchName", "") for n in range(seen)]
        if is_rocm()
        else [],
        targets=sorted({name.partition(":")[0] for name in torch.cuda.get_arch_list()}),
        apple=torch.backends.mps.is_available(),
    )


def matmul_error(device: Device) -> float:
    """The relative error of a product in the device's compute dtype against float32 on the processor."""
    torch.manual_seed(0)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    given = (a.to(device.place, device.compute_dtype) @ b.to(device.place, device.compute_dtype)).float().cpu()
    return float((given - a @ b).norm() / (a @ b).norm())


def losses(device: Device) -> list[float]:
    """
    Cross entropy of one attention layer that learns to copy the token two places back, step by step.

    It exercises what training needs: embedding, fused attention, matrix products, softmax, their gradients, AdamW.
    """
    torch.manual_seed(0)
    period = torch.randint(0, 32, (16, 2))
    ids = period.repeat(1, 17).to(device.place)
    table, into, out = nn.Embedding(32, 64), nn.Linear(64, 192), nn.Linear(64, 32)
    model = nn.ModuleList([table, into, out]).to(device.place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        with torch.autocast(device.place.type, torch.bfloat16, enabled=device.compute_dtype == torch.bfloat16):
            hidden = table(ids[:, :-1])
            q, k, v = into(hidden).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            logits = out(hidden + mixed.transpose(1, 2).flatten(2))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def compute() -> None:
    device = find()
    say(device=device.name, vendor=device.vendor, dtype=str(device.compute_dtype).removeprefix("torch."))
    say(matmul_error=matmul_error(device))
    curve = losses(device)
    device.synchronize()
    say(first_loss=curve[0], last_loss=curve[-1])


if __name__ == "__main__":
    {"torch": describe, "compute": compute}[sys.argv[1]]()
