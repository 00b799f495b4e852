"""Peak bytes beyond the inputs of DPO on materialised logits, as torch users write it, beside bench/memory.lua.

    python bench/peers/memory.py [sequences] [length] [hidden] [vocabulary]
"""
import sys
import torch
import torch.nn.functional as F

S, T, C, V = [int(a) for a in sys.argv[1:]] or [8, 1024, 4096, 128256]
N = S * T
torch.manual_seed(0)
draw = lambda *size: torch.randn(*size, device='cuda', dtype=torch.bfloat16)
x, w, ref_x, ref_w = draw(N, C).requires_grad_(), (draw(V, C) * 0.02).requires_grad_(), draw(N, C), draw(V, C) * 0.02
target = torch.randint(0, V, (N,), device='cuda')


def sums(hidden, weight):
    logp = F.log_softmax((hidden @ weight.T).float(), -1)
    return logp.gather(-1, target[:, None])[:, 0].view(S, T).sum(-1)


before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
with torch.no_grad():
    ref = sums(ref_x, ref_w)
ratio = sums(x, w) - ref
loss = -F.logsigmoid(0.1 * (ratio[:S // 2] - ratio[S // 2:])).mean()
loss.backward()
print(f'torch DPO, {S} x {T} tokens, C {C}, V {V}: {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB beyond the inputs')
