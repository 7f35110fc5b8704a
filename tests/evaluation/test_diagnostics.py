"""Diagnostics of a tiny model's capture."""

import math
import shutil
import subprocess

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.store import CaptureStore
from sparsekv.evaluation.diagnose import DiagnosticsConfig, run_diagnostics
from sparsekv.evaluation.diagnostic_figures import by_quartile, diagnostic_figures
from sparsekv.evaluation.measure import coverage
from sparsekv.evaluation.requests import RULER_OFFLINE
from sparsekv.util.errors import SparseKVError

LENGTH = 256
BUDGETS = (0.0, 0.05, 0.2, 0.5, 1.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    folder, model = tmp_path_factory.mktemp("diagnostics"), make_model()
    text = folder / "text.txt"
    text.write_text("".join(f"Line {i}: {i * i % 97} grey owls & {i % 13} gnus (all wise) watch. " for i in range(80)))
    store = run_capture(
        CaptureConfig(model="tiny", corpus=str(text), output=str(folder / "store"), context_length=LENGTH,
                      num_documents=2, queries_per_document=12, device="cpu"),
        model=model, tokenizer=tokenizer)
    router, phi = artifacts(model, space="rot")
    router.save(folder / "router")
    phi.save(folder / "phi")
    config = DiagnosticsConfig(
        capture=str(store.path), output=folder / "out", router=folder / "router", phi=folder / "phi", requests=4,
        budgets=",".join(map(str, BUDGETS)), shoot_out=True, tasks=f"other={store.path}", device="cpu")
    return folder, config, run_diagnostics(config).diagnostics


def test_errors_are_those_of_attention_written_out(made) -> None:
    folder, _, d = made
    store = CaptureStore.open(folder / "store")
    budget, layer = BUDGETS[1], 1
    found = []
    for document in range(2):
        item = store.read(layer, document)
        q, k, v, positions = item.queries_rot(), item.keys_rot(), item.values.float(), item.query_positions.tolist()
        for start in (4, 6, 8, 11):  # of twelve, four past the first third
            prefill = positions[start]
            steps = [t for t, p in enumerate(positions) if prefill <= p < prefill + 64]
            mid = list(range(4, prefill - 16))
            count = math.ceil(budget * (positions[steps[-1]] + 1) - 1e-9)
            for t in steps:
                end = positions[t] + 1
                scores = q[:, t].reshape(2, 2, -1) @ k[:, :end].mT * item.scale
                shared = scores[..., mid].softmax(-1).sum(1)
                for head in range(4):
                    best = [mid[i] for i in shared[head // 2].topk(min(count, len(mid))).indices.tolist()]
                    read = sorted({*range(4), *range(prefill - 16, end), *best})
                    s = scores[head // 2, head % 2]
                    full, sparse = s.softmax(-1) @ v[head // 2, :end], s[read].softmax(-1) @ v[head // 2, read]
                    found.append((head, float((sparse - full).norm() / full.norm()), float(s.softmax(-1)[read].sum())))
    for head in range(4):
        mine = [x for x in found if x[0] == head]
        assert d.errors["topk"][1, head, 1] == pytest.approx(sum(x[1] for x in mine) / len(mine), rel=1e-3)
        assert d.mass["topk"][1, head, 1] == pytest.approx(sum(x[2] for x in mine) / len(mine), rel=1e-3)


def test_coverage_is_the_fewest_keys_that_hold_the_share(made) -> None:
    folder, _, _ = made
    item = CaptureStore.open(folder / "store").read(1, 0)
    q, k, positions = item.queries_rot().double(), item.keys_rot().double(), item.query_positions.tolist()
    found = coverage(item)
    for head in range(4):
        for share in (75, 95):
            counts = []
            for t, place in enumerate(positions):
                held = (k[head // 2, :place + 1] @ q[head, t] * item.scale).softmax(0).sort(descending=True).values
                counts.append(next(n for n in range(1, place + 2) if held[:n].sum() >= share / 100))
            assert float(found[f"cover{share}"][head]) == pytest.approx(sum(counts) / len(counts), abs=0.1)


def test_tables_hold_what_must_be_so(made) -> None:
    _, _, d = made
    assert set(d.errors) == {"topk", "topk+phi", "router", "router+phi", "sketch", "sketch+phi", "topk+centroid"}
    for name, table in d.errors.items():
        assert table.shape == (3, 4, len(BUDGETS)) and torch.isfinite(table).all()
        assert table[..., -1].max() < 1e-3, name
    for selector in ("topk", "router", "sketch"):
        assert torch.allclose(d.errors["topk"][..., 0], d.errors[selector][..., 0], atol=1e-6)
        assert (d.mass[selector].diff(dim=-1) > 0).all() and (d.read[selector].diff(dim=-1) > 0).all()
    assert (d.mass["topk"].sum((0, 1)) >= d.mass["router"].sum((0, 1)) - 1e-4).all()
    grouped = d.recall["oracle"].reshape(3, 2, 2, -1).mean(2)
    assert (grouped[..., 1:4] <= 1.05).all() and torch.allclose(grouped[..., -1], torch.ones(3, 2), atol=1e-5)
    assert (d.heads["cover75"] <= d.heads["cover95"]).all() and ((d.heads["entropy"] > 0) & (d.heads["entropy"] < 1)
                                                                 ).all()
    assert (d.heads["imbalance"] >= 1).all() and sum(d.gaps) > 1000 and set(d.tasks) == {"text.txt", "other"}
    low, *_, high = by_quartile(d, d.heads["entropy"][..., None])
    assert low[0] < high[0]


def test_bad_options_are_refused(made, tmp_path) -> None:
    _, config, _ = made
    for wrong, message in (({}, "--overwrite"), ({"budgets": "2"}, "from 0 to 1"), ({"budgets": "x"}, "not understood"),
                           ({"tasks": "x"}, "LABEL=STORE"), ({"capture": str(tmp_path)}, "no capture store"),
                           ({"tasks": f"a={config.capture},a=b"}, "'a' twice"),
                           ({"tasks": f"text.txt={config.capture}"}, "has; give another")):
        with pytest.raises(SparseKVError, match=message):
            run_diagnostics(DiagnosticsConfig(**{**vars(config), "overwrite": bool(wrong), **wrong}))


TITLES = ("Error by budget", "Entropy by layer", "Mass curve", "Keys that hold the attention", "Router recall by layer",
          "Entropy by task", "Gain by entropy", "Kernel values", "ŝ − s")


def test_every_figure_is_in_the_report_and_in_the_folder(made) -> None:
    folder, _, d = made
    assert tuple(f.title for f in diagnostic_figures(d)) == TITLES
    page = (folder / "out" / "report.html").read_text()
    assert page.count("<svg") == page.count("<figure>") == len(TITLES) and "http-equiv" not in page
    pngs = list((folder / "out" / "figures").glob("*.png"))
    assert len(pngs) == len(TITLES) and all(p.read_bytes()[:4] == b"\x89PNG" and p.stat().st_size > 5000 for p in pngs)


def test_the_eval_report_maps_needles(made, saved_model, tmp_path) -> None:
    from sparsekv.evaluation.run import EvalConfig, run_eval

    result = run_eval(EvalConfig(
        model=str(saved_model), output=tmp_path / "out", tasks="needle", corpus=str(made[0] / "text.txt"), split="all",
        samples=1, lengths="200,420", methods="topk", needle_depths="0.25,0.75", budgets="0.1", device="cpu"))
    cells = [r for r in result.rows if r["metric"] == "needle"]
    assert {(r["method"], r["budget"], r["length"], r["depth"]) for r in cells} == {
        (*method, length, depth) for method in (("full", None), ("topk", 0.1)) for length in (200, 420)
        for depth in (0.25, 0.75)}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 1 and "Needles by depth and length" in page
    assert (tmp_path / "out" / "figures" / "needles-by-depth-and-length.png").stat().st_size > 3000


BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


PROBE = """<script>onload = () => {
  const figures = [...document.querySelectorAll('figure')], clashes = [];
  const drawn = figures.filter(f => {
    const b = f.querySelector('svg').getBoundingClientRect();
    return b.width > 300 && b.height > 150 && f.querySelectorAll('svg path').length > 3});
  for (const f of figures) {
    const texts = [...f.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    const frame = f.querySelector('svg').getBoundingClientRect();
    for (const [i, [one, a]] of texts.entries()) {
      if (a.left < frame.left - 1 || a.right > frame.right + 1) clashes.push(one + ' leaves the figure');
      for (const [other, b] of texts.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) clashes.push(one + ' on ' + other)}}
  const root = document.documentElement;
  document.title = `drawn ${drawn.length}, too wide ${root.scrollWidth > root.clientWidth}, clashes ${clashes}`}
</script></body>"""


def in_a_browser(page, tmp_path, *options: str) -> str:
    """What the probe found on the page, on the screen of a laptop."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1366,768",
                           "--host-resolver-rules=MAP * ~NOTFOUND", *options, "--dump-dom", probed.as_uri()],
                          capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.partition("<title>")[2].partition("</title>")[0]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
def test_a_browser_draws_every_figure(made, tmp_path) -> None:
    for options in ((), ("--blink-settings=preferredColorScheme=0",)):
        found = in_a_browser(made[0] / "out" / "report.html", tmp_path, *options)
        assert found == f"drawn {len(TITLES)}, too wide false, clashes "


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
def test_a_browser_draws_a_sweep(tmp_path) -> None:
    from sparsekv.evaluation.report import write_report
    from sparsekv.evaluation.result_figures import result_figures
    from sparsekv.evaluation.scores import score_rows
    from sparsekv.evaluation.tables import lane_a, lane_b, report_tables

    methods = dict.fromkeys(("full", *lane_a(), *lane_b()))
    cells = [{"case": f"{task}@8192", "method": method, "budget": None if method in ("full", "streaming") else budget,
              "indices": [0, 1, 2], "scores": [0.3 + 0.01 * i, 0.2, 0.9], "read": 0.03, "cache_tokens": 9.0,
              "tokens": 7000, "seconds": 1.0, "answers": [""] * 3}
             for task in RULER_OFFLINE for i, method in enumerate(methods) for budget in (0.01, 0.02, 0.03, 0.05, 0.1)]
    needles = [{"case": f"needle@{length}", "task": "needle", "method": method, "budget": budget, "metric": "needle",
                "value": 0.5, "length": length, "depth": depth}
               for method, budget in (("full", None), ("topk", 0.01), ("quest", 0.05), ("router+phi", 0.05))
               for length in (1024, 131072) for depth in (0.0, 0.5, 1.0)]
    rows = score_rows(cells)
    figures = result_figures(rows + needles)
    assert [f.title for f in figures] == ["ruler@8192: score by budget, lane A", "ruler@8192: score by budget, lane B",
                                          "Selectivity by task, 8192 tokens", "Needles by depth and length"]
    tables, details = report_tables(rows)
    page = write_report(tmp_path / "r.html", "sweep", "", tables, figures, details)
    assert in_a_browser(page, tmp_path) == "drawn 4, too wide false, clashes "
