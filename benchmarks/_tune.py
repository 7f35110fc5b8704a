"""Launch constants of the completed step on this GPU: `python benchmarks/_tune.py [SHAPE ...]`."""
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.decode import SHAPES, Buffers, check, timed
from sparsekv.kernels import attend, attend_tokens, completion

CONFIGS = [(64, 2, 1, True), (64, 2, 2, True), (32, 1, 2, True), (32, 1, 3, True), (16, 1, 1, True), (16, 1, 2, True),
           (16, 1, 3, True), (32, 2, 1, True), (32, 2, 2, True), (32, 2, 3, True), (64, 4, 1, True), (64, 4, 2, True),
           (32, 1, 3, False), (32, 1, 5, False), (16, 1, 3, False), (16, 1, 5, False), (16, 1, 7, False),
           (32, 2, 3, False), (32, 2, 5, False), (64, 2, 3, False), (64, 4, 3, False), (64, 4, 5, False)]
PROGRAMS = (512, 768, 1056, 1584)
PLAIN = [(32, 1, 1, True), (16, 1, 1, True), (32, 1, 3, False), (16, 1, 3, False), (16, 1, 5, False), (32, 2, 3, False)]


def swept(name, sets, run, field, configs, programs):
    truth, best = None, {}
    kept = getattr(attend, field)
    for (block, warps, stages, ahead), wanted in itertools.product(configs, programs):
        setattr(attend, field, kept._replace(block=block, warps=warps, programs=wanted, stages=stages, ahead=ahead))
        try:
            out = run(sets[0]).float()
            truth = out if truth is None else truth
            gap = float((out - truth).norm() / truth.norm())
            best[block, warps, stages, ahead, wanted] = round(timed([lambda b=b: run(b) for b in sets], 7), 1), round(gap, 4)
        except Exception as error:  # a configuration that does not fit
            print("   ", name, block, warps, stages, ahead, wanted, type(error).__name__, str(error)[:80])
    setattr(attend, field, kept)
    order = sorted(best.items(), key=lambda x: x[1][0])
    print(name, "default", kept, best.get((kept.block, kept.warps, kept.stages, kept.ahead, kept.programs)), flush=True)
    for key, value in order[:10]:
        print("    (block, warps, stages, ahead, programs)", key, *value)
    print("    best of each:", {c: min((v[0], k[4]) for k, v in best.items() if k[:4] == c) for c in configs
                                if any(k[:4] == c for k in best)}, flush=True)
    return order[0][0] if order else None


def main():
    torch.manual_seed(0)
    check()
    wanted = sys.argv[1:] or ["32x8-128k-b8", "32x8-128k-b1"]
    for case, heads_q, heads, length, batch in SHAPES:
        if case not in wanted:
            continue
        sets = [Buffers(heads_q, heads, length, batch, 0.5, False, seed=i) for i in range(3)]
        for b in sets:
            b.completion()
            b.attention_only()
            b.asked = b.phi.query(b.view, b.queries)

        def completed(b):
            return attend_tokens(b.q, b.k, b.v, b.fixed, completion=b.asked, **b.options())[0]

        def line(**how):
            print(case, {name: round(timed([getattr(b, name) if isinstance(name, str) else name for b in sets]), 1)
                         for name in how["names"]}, flush=True)

        print(case, "query", {n: (setattr(completion, "QUERY_PROGRAMS", n), round(timed(
            [lambda b=b: b.phi.query(b.view, b.queries).numerator for b in sets]), 1))[1]
            for n in (16, 32, 64, 128, 100_000)}, flush=True)
        completion.QUERY_PROGRAMS = 64
        line(names=("route_only", "attention_only", "sparse", "sparse_phi", "sparse_sketch", "sparse_sketch_phi"))
        plain = swept(f"{case} plain", sets, Buffers.attention_only, "PLAIN", PLAIN, (512, 768, 1024, 1536))
        best = swept(f"{case} completed", sets, completed, "COMPLETED", CONFIGS, PROGRAMS)
        for field, found in (("PLAIN", plain), ("COMPLETED", best)):
            setattr(attend, field, getattr(attend, field)._replace(**dict(zip(
                ("block", "warps", "stages", "ahead", "programs"), found, strict=True))))
        for n in (32, 64, 128, 100_000):
            completion.QUERY_PROGRAMS = n
            print("with the best,", n, "programs of the query:", end=" ")
            line(names=("sparse", "sparse_phi", "sparse_sketch", "sparse_sketch_phi"))
        completion.QUERY_PROGRAMS = 64
        del sets, b, completed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
