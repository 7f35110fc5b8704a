"""Settings of the completed attention kernel, timed: python tune.py OUT.json (from the repository root, PYTHONPATH=$PWD:WHEELS). One H100/H200, ~1 min.

Rows: shape, launch (block, warps, programs), µs of attention alone (split + merge, a graph of 20 calls over 4 copies of the cache), without completion, and the sums.
"""
import itertools, json, sys, time
import torch
from sparsekv.kernels import KeyFeatures, CompletionQuery, attend, features, phi_sums
from sparsekv.kernels.attend import Launch, launch_attend
from sparsekv.kernels.features import phi_sums_reference

D, U, R = 128, 128, 128
def random(*s, scale=1.0): return torch.randn(*s, device="cuda") * scale
def timed(calls, repeat=20):
    for c in calls: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(repeat): calls[i % len(calls)]()
    g.replay(); torch.cuda.synchronize()
    best = 1e9
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) * 1000 / repeat)
    return round(best, 2)
out, began = [], time.time()
for hq, h, n, batch in ((32, 8, 32768, 1), (32, 8, 131072, 1), (32, 8, 524288, 1), (32, 8, 131072, 4), (32, 8, 131072, 8), (12, 2, 30000, 24)):
    copies = []
    for c in range(2 if n * batch > 600000 else 4):
        torch.manual_seed(c)
        k, v = (random(batch, h, n, D).bfloat16() for _ in range(2))
        q = random(batch, hq, D).bfloat16()
        tokens = torch.stack([torch.randperm(n - 20, device="cuda")[: n // 100] + 4 for _ in range(batch * h)]).reshape(batch, h, -1).int()
        maps = KeyFeatures(random(h, D, U, scale=D**-0.5).bfloat16(), random(batch, h, U), random(h, U, R, scale=U**-0.5).bfloat16(), random(h, R), torch.zeros(batch, h, R, device="cuda"))
        f = torch.rand(batch, hq, R, device="cuda").bfloat16()
        done = CompletionQuery(f, random(batch, hq), torch.full((batch, hq), 1e6, device="cuda"), random(batch, hq, D), None, maps)
        edges = dict(starts=torch.zeros(batch, dtype=torch.long, device="cuda"), sink_size=4, tail_starts=torch.full((batch,), n - 16, device="cuda"), lengths=torch.full((batch,), n, device="cuda"), scale=D**-0.5)
        copies.append((q, k, v, tokens, edges, done, maps))
    row = {"shape": f"{hq}/{h} {n} x{batch}", "plain": timed([lambda c=c: launch_attend(*c[:4], **c[4]) for c in copies])}
    # right before fast
    c = copies[0]
    a = launch_attend(*c[:4], **c[4], completion=c[5]); t = attend.attend_tokens_reference(*(x.float() for x in c[:3]), c[3], **c[4], completion=CompletionQuery(*(x if x is None or isinstance(x, tuple) else x.float() for x in c[5])))
    row["error"] = float((a[0].float() - t[0]).norm() / t[0].norm())
    first = torch.full((batch,), 4, device="cuda"); last = torch.full((batch,), n - 16, device="cuda")
    for warps in (4, 8):
        features.SUM_WARPS = warps
        row[f"sums w{warps}"] = timed([lambda c=c: phi_sums(c[1], c[2], first, last, c[6]) for c in copies], 4)
    if n <= 131072 and batch == 1:
        x, y = phi_sums(c[1], c[2], first, last, maps), phi_sums_reference(c[1], c[2], first, last, maps)
        row["sums error"] = [float((getattr(x, n_) * torch.exp2(x.m - y.m).reshape(*x.m.shape, *[1] * (getattr(x, n_).dim() - 3)) - getattr(y, n_)).norm() / getattr(y, n_).norm()) for n_ in ("z", "s")]
    best = None
    for block, warps, programs in itertools.product((32, 64, 128), (4, 8), (132, 264, 396, 528)):
        attend.COMPLETED = Launch(block, warps, programs)
        attend.COMPLETED_ROW, attend.COMPLETED_BYTES = 1 << 20, 0
        try:
            us = timed([lambda c=c: launch_attend(*c[:4], **c[4], completion=c[5]) for c in copies])
        except Exception as e:
            us = None
        row[f"{block}/{warps}/{programs}"] = us
    out.append(row); print(json.dumps(row), flush=True)
    json.dump({"device": torch.cuda.get_device_name(), "rows": out}, open(sys.argv[1], "w"), indent=1)
    del copies; torch.cuda.empty_cache()
print("seconds", time.time() - began)
for r in out:
    best = sorted((v, k) for k, v in r.items() if "/" in k and isinstance(v, float))[:4]
    print(r["shape"], "plain", r["plain"], "best", best, "error", f"{r['error']:.1e}", {k: v for k, v in r.items() if k.startswith("sums")})
