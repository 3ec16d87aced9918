"""A small model that is trained: everything together, and the one probe whose answer cannot be right by accident."""

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device, find
from bloomery.hw.probe.compare import say, tell_device

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 60


def training() -> None:
    device = find()
    tell_device(device)
    say(trying="the first step")
    curve = losses(device)
    say(first_loss=curve[0], last_loss=curve[-1])


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
    for step in range(STEPS):
        with torch.autocast(device.place.type, torch.bfloat16, enabled=device.compute_dtype == torch.bfloat16):
            hidden = table(ids[:, :-1])
            q, k, v = into(hidden).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            logits = out(hidden + mixed.transpose(1, 2).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(float(loss.detach()))
        if step % 20 == 0:
            say(trying=f"step {step + 1}")
    return found
