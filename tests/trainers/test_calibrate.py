"""Errors of many shifts at once against the outputs one by one; gates that never raise a mean."""

import torch

from sparsekv.core.offline import capped, make_scene, mass_errors, output, relative_error, top_k
from sparsekv.trainers.calibrate import CASES, choose_gates


def test_errors_of_shifts_are_those_of_the_outputs() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(4, 5, 8) * 2, torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    positions = torch.tensor([[5, 25, 40, 50, 59]]).expand(4, -1)
    scene = make_scene(queries, keys, values, positions, scale=0.4, sink_size=2, window_size=6)
    logits = scene.scores.masked_fill(~scene.mid, 0.0) + 0.7 * torch.randn(4, 5, 60)
    shifts = torch.tensor([-2.0, 0.0, 0.5])
    for read in (None, top_k(scene, 0.1)):
        alone, completed = mass_errors(scene, logits, read, shifts)
        torch.testing.assert_close(alone, relative_error(scene, output(scene, read)), rtol=1e-4, atol=1e-5)
        lowered = capped(scene, logits, read)
        for shift, found in zip(shifts, completed, strict=True):
            expected = relative_error(scene, output(scene, read, lowered + shift))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gates_never_raise_the_mean_of_a_case() -> None:
    generator = torch.Generator().manual_seed(0)
    none = {case: torch.rand(3, 5, generator=generator) for case in CASES}
    factor = {case: 0.4 + torch.rand(3, 5, generator=generator) for case in CASES}
    factor["topk@0.1"] = factor["topk@0.1"] + 0.3  # completion hurts most heads here
    tables = {f"{case} error": none[case] for case in CASES}
    tables |= {f"{case} + phi error": none[case] * factor[case] for case in CASES}
    helped = torch.stack(list(factor.values())).mean(0) < 1
    assert float((none["topk@0.1"] * (factor["topk@0.1"] - 1) * helped).mean()) > 0  # not enough to look at averages
    gate = choose_gates(tables)
    assert gate.shape == (3, 5) and 0 < int(gate.sum()) < 15
    for case in CASES:
        gated = torch.where(gate > 0, tables[f"{case} + phi error"], none[case])
        assert float(gated.mean()) <= float(none[case].mean())
    good = {name: t * (0.5 if "phi" in name else 1.0) for name, t in
            {f"{case}{w} error": none[case] for case in CASES for w in ("", " + phi")}.items()}
    assert bool((choose_gates(good) == 1).all())
