"""`sparsekv train`: one command from text to artifacts, what it says before it starts, and how it goes on."""

from __future__ import annotations

import html
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tiny import make_model, prompt, save_model

import sparsekv
from sparsekv.artifacts.hub.models import load_config
from sparsekv.artifacts.hub.text_quality import read_quality
from sparsekv.artifacts.inspection import InspectConfig, inspect_path
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.trainers.estimate import GPU, ModelShape, Work, estimate, prefill_seconds, shape_of
from sparsekv.trainers.pipeline import (
    ON_GPU,
    TrainConfig,
    Trained,
    TrainingPlan,
    _work,
    plan_training,
    planned,
    run_train,
)
from sparsekv.util.errors import SparseKVError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny model, a text and a whole training."""
    folder = tmp_path_factory.mktemp("train")
    save_model(folder / "model")
    (folder / "text.txt").write_text("".join(f"The {i}th line says {i * i % 97}.\n" for i in range(400)))
    run_train(config(folder, "whole"))
    return folder


def config(place: Path, output: str, **changed: object) -> TrainConfig:
    return TrainConfig(**{"model": str(place / "model"), "corpus": str(place / "text.txt"),
                          "output": str(place / output), "num_documents": 3, "context_length": 192, "phi_steps": 8,
                          "device": "cpu", **changed})


def same(one: Path, other: Path) -> bool:
    routers, maps = ([kind.load(p / name) for p in (one, other)] for kind, name in (
        (RouterArtifact, "router"), (PhiArtifact, "phi")))
    return torch.equal(routers[0].centroids, routers[1].centroids) and torch.equal(
        maps[0].maps.query.w_in, maps[1].maps.query.w_in)


def test_one_command_and_one_name(place: Path, capsys) -> None:
    whole = place / "whole"
    assert sorted(p.name for p in whole.iterdir()) == ["README.md", "capture", "phi", "quality.json", "quality.png",
                                                       "report.html", "router", "train.json"]
    with sparsekv.attach(make_model(), whole, token_budget=8, dense_below=0) as attachment:
        assert attachment.generate(prompt(60), max_new_tokens=3).shape == (1, 63)
        assert attachment.decoding.phi is not None and attachment.report()["sparse_calls"]
    page = (whole / "README.md").read_text()
    for part in ("library_name: sparsekv", "# Router and feature maps for model", "3 of 3 layers", "| sink + tail |",
                 "](router/quality.png)", "](phi/quality.png)", "2 windows of 192 tokens of `text.txt` (train)"):
        assert part in page, part
    assert str(place) not in page
    quality = read_quality(whole)
    assert quality is not None and quality.unseen and quality.windows == 4 and quality.tokens == 96
    for part in (quality.table(), quality.advice(), "](quality.png)", "Text: `text.txt`",
                 f"--token-budget {quality.recommended.token_budget:g} ", quality.recommended.arguments):
        assert part in page, part
    assert (whole / "quality.png").read_bytes().startswith(b"\x89PNG")
    shown, data = (whole / "report.html").read_text(), ModelCard(page).data
    assert all(html.escape(words).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in shown
               for words in (*quality.verdict().values(), quality.advice()))
    assert shown.count('<tr class="default">') == 1 and shown.count("<svg") == 1 and str(place) not in shown
    best = quality.recommended
    assert quality.ms_per_token and all(s.ms_per_token for s in quality.settings)
    assert {r.metric_type: r.metric_value for r in data.eval_results} == {
        "perplexity": round(quality.perplexity * (1 + best.loss), 5), "kl": round(best.kl, 5),
        "same next token": round(best.same_tokens, 5)}
    assert quality.text() in Trained(whole, RouterArtifact.load(whole / "router"), PhiArtifact.load(whole / "phi"),
                                     quality).summary()
    for kind in ("router", "phi"):
        assert (whole / kind / "quality.png").read_bytes().startswith(b"\x89PNG")
        assert "](quality.png)" in (whole / kind / "README.md").read_text()
    capsys.readouterr()
    inspect_path(InspectConfig(str(whole)))
    said = capsys.readouterr().out
    assert "router " in said and "feature maps " in said and quality.text() in said


def test_it_says_what_it_takes_and_writes_nothing(place: Path, capsys) -> None:
    said = run_train(config(place, "dry", dry_run=True)).summary()
    assert "nothing was written" in said and not (place / "dry").exists()
    with pytest.raises(SparseKVError, match="leaves none of the 3 windows"):
        run_train(config(place, "dry", dry_run=True, synthetic_documents=3))
    shown = capsys.readouterr().err
    for part in ("3 windows of 192 tokens", "3 of 3 layers", "for the capture", "GB free", "capture 1 s", "on text 1 s",
                 "estimated", "docs/results/training.md", "docs/start.md"):
        assert part in shown, part


def test_disk_is_estimated_as_it_is_used(place: Path) -> None:
    work = Work(3, 192, 96, 256, 8, 64, 48, 352, 32, 64, 0, False)
    found = estimate(shape_of(load_config(str(place / "model")), None, 4), work, GPU)
    stored = sum(f.stat().st_size for f in (place / "whole" / "capture").rglob("*.safetensors"))
    assert found.store == pytest.approx(stored, rel=0.06)
    made = sum((place / "whole" / kind / "model.safetensors").stat().st_size for kind in ("router", "phi"))
    assert found.artifacts == pytest.approx(made, rel=0.1)


def llama_8b(layers: int = 32) -> ModelShape:
    return ModelShape(8_030_000_000, layers, 32, 32, 8, 128, 14336, 2)


def test_estimates_give_back_what_was_measured() -> None:
    coder = ModelShape(1_780_000_000, 28, 28, 12, 2, 128, 8960, 2)  # one H100, 32 windows of 16k (docs/train.md)
    found = estimate(coder, Work(32, 16_384, 768, 1024, 2500, 256, 192, 4096, 64, 0, 1, True), GPU)
    assert found.phi_seconds == pytest.approx(127, rel=0.1) and found.router_seconds == pytest.approx(13, rel=0.1)
    assert 249 / 1.5 < found.seconds - found.text_seconds < 249  # the command had no card on text
    eight = ModelShape(2_000_000_000, 8, 8, 32, 8, 128, 14336, 2)
    for length, seconds, stored, peak in ((32_768, 0.357, 1.147, 8.03), (131_072, 2.958, 4.587, 12.23)):
        work = Work(1, length, length // 64, 1024, 1, 128, 128, 2048, 64, 0, 1, True)
        found = estimate(eight, work, GPU)
        assert prefill_seconds(eight, work, GPU) == pytest.approx(seconds, rel=0.05)
        assert found.capture_seconds == pytest.approx(max(seconds, stored / 0.87), rel=0.05)
        assert found.store == pytest.approx(stored * 1e9, rel=0.01)
        assert found.capture_memory == pytest.approx(peak * 1e9, rel=0.2)


@pytest.mark.parametrize(("shape", "documents"), [
    (ModelShape(1_240_000_000, 16, 16, 32, 8, 64, 8192, 2), 24), (llama_8b(), 24),
    (ModelShape(70_600_000_000, 80, 80, 64, 8, 128, 28672, 2), 16)], ids=["1B", "8B", "70B"])
def test_windows_are_24_where_100_gb_hold_them(shape: ModelShape, documents: int) -> None:
    plan = planned(TrainConfig("m", "c", "o"), ON_GPU, shape, 131_072, 80_000_000_000)
    assert (plan.documents, plan.context_length, plan.queries) == (documents, 16_384, 768)
    found = estimate(shape, _work(plan), GPU)
    assert found.store <= 100e9 or plan.documents == 16
    at_once = plan.layer_group or shape.layers
    assert found.training_memory(at_once) <= 0.7 * 80e9 < found.training_memory(at_once + 1) or at_once == shape.layers


def test_a_resumed_training_keeps_its_sizes(place: Path) -> None:
    kept = TrainingPlan(5, 1, 100, 50, 2, {}, {"max_steps": 3})
    plan, said = plan_training(config(place, "whole"), kept)
    assert plan == kept and "5 windows of 100 tokens, 1 of them synthetic" in said and "2 layers at once" in said


def test_what_is_finished_is_kept(place: Path) -> None:
    out = place / "again"
    shutil.copytree(place / "whole", out)
    shutil.rmtree(out / "phi")
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*.safetensors")}
    run_train(config(place, "again"))
    assert {f: f.stat().st_mtime_ns for f in before} == before and same(out, place / "whole")
    (out / "quality.json").unlink()  # of a version without it, or interrupted there
    shutil.rmtree(out / "capture")
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*.safetensors")}
    made = run_train(config(place, "again"))
    assert {f: f.stat().st_mtime_ns for f in before} == before
    whole = read_quality(place / "whole")
    assert whole is not None and made.quality is not None
    again, first = ([replace(s, ms_per_token=None) for s in quality.settings] for quality in (made.quality, whole))
    assert again == first


def test_a_corpus_with_no_held_out_window_is_measured_on_those_of_the_calibration(place: Path) -> None:
    (place / "short.txt").write_text((place / "text.txt").read_text()[:900])
    made = run_train(config(place, "short", corpus=str(place / "short.txt")))
    assert made.quality is not None and not made.quality.unseen and made.quality.windows == 1
    assert "the maps were calibrated on these windows" in (made.path / "README.md").read_text()


def test_other_trainings_and_other_folders_are_refused(place: Path, tmp_path) -> None:
    with pytest.raises(SparseKVError, match="was started with phi_steps 8; now found phi_steps 9"):
        run_train(config(place, "whole", phi_steps=9))
    with pytest.raises(SparseKVError, match="is finished; --overwrite trains again"):
        run_train(config(place, "whole"))
    (tmp_path / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(SparseKVError, match=r"already exists|something else than a training"):
            run_train(config(place, str(tmp_path), overwrite=overwrite))
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    for changed, message in (({"layers": "2-7"}, "names layer 7; this model has layers 0 to 2"),
                             ({"dtype": "int3"}, "unknown dtype"), ({"model": "/none"}, "no model at"),
                             ({"corpus": "/none.txt"}, "none.txt"),
                             ({"num_documents": 500}, "--context-length or --num-documents")):
        with pytest.raises(SparseKVError, match=message):
            run_train(config(place, "refused", **changed))
        assert not (place / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_stopped_and_gone_on(forks, place: Path, number: signal.Signals) -> None:
    out, options = place / number.name, config(place, number.name, phi_steps=3000)
    words = [w for k in ("num_documents", "context_length", "phi_steps", "device")
             for w in (f"--{k.replace('_', '-')}", getattr(options, k))]
    process = forks.start("-m", "sparsekv.cli", "train", options.model, options.corpus, "-o", out, *words)
    ends = time.monotonic() + 200
    while not list(out.glob("phi/checkpoints/*.ckpt")):
        assert process.poll() is None and time.monotonic() < ends, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate()[1]
    if number == signal.SIGTERM:
        assert process.returncode == 143 and "the same command goes on from there" in said, said
        assert "--resume" not in said
    run_train(options)
    assert (out / "README.md").is_file() and PhiArtifact.load(out / "phi").config.provenance["options"]["max_steps"]


PAGE = {"SmolLM2-135M": (ModelShape(134_515_008, 30, 30, 9, 3, 64, 1536, 2), 8192),
        "Llama-3.2-1B": (ModelShape(1_235_814_400, 16, 16, 32, 8, 64, 8192, 2), 131_072),
        "Llama-3.1-8B": (llama_8b(), 131_072),
        "Qwen3-8B": (ModelShape(8_190_735_360, 36, 36, 32, 8, 128, 12288, 2), 40_960),
        "Qwen3-32B": (ModelShape(32_762_123_264, 64, 64, 64, 8, 128, 25600, 2), 40_960),
        "Llama-3.1-70B": (ModelShape(70_553_706_496, 80, 80, 64, 8, 128, 28672, 2), 131_072)}
"""The models of docs/train.md, and their longest context [tokens]."""


@pytest.mark.parametrize("name", PAGE)
def test_the_page_says_what_the_formulas_give(name: str) -> None:
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |")).strip("| ").split(" | ")[1:]
    shape, longest = PAGE[name]
    plan = planned(TrainConfig("m", "c", "o"), ON_GPU, shape, longest, 80_000_000_000)
    assert cells[0].replace(",", "").split() == [str(plan.documents), str(plan.context_length)]
    found = estimate(shape, _work(plan), GPU)
    layers = plan.layer_group or shape.layers
    assert cells[4].endswith(f"({layers})")
    shown = [cell.split()[0] for cell in cells[1:]]
    made = [found.store / 1e9, found.artifacts / 1e9, found.capture_memory / 1e9, found.training_memory(layers) / 1e9,
            found.capture_seconds, found.router_seconds, found.phi_seconds, found.card_seconds + found.text_seconds]
    for cell, value in zip(shown, made, strict=True):
        assert float(cell) == pytest.approx(value, abs=0.051 if "." in cell else 0.51)


def test_the_papers_router_is_one_option_away(place: Path, capsys) -> None:
    """A query model is trained, complete with maps that leave the same sizes to exact attention; it decodes by the
    density rule and by whole buckets."""
    saap = {"router": "saap", "router_steps": 2, "context_length": 2400, "num_documents": 2, "synthetic_documents": 0}
    with pytest.raises(SparseKVError, match=r"saap reads 2048 tokens of a window exactly, 256 more.*have 192"):
        run_train(config(place, "saap", router="saap"))
    with pytest.raises(SparseKVError, match="--router-steps is of a query model"):
        run_train(config(place, "saap", router_steps=2))
    (place / "longer.txt").write_text("".join(f"The {i}th line says {i * i % 97}.\n" for i in range(2000)))
    made = run_train(config(place, "saap", corpus=str(place / "longer.txt"), **saap))
    said = made.summary()
    assert "a query model of 1024 hidden units by gradient (Saap)" in said
    assert "nothing by gradient" in RouterArtifact.load(place / "whole" / "router").summary()
    router, phi = RouterArtifact.load(place / "saap" / "router"), PhiArtifact.load(place / "saap" / "phi")
    assert router.weights is not None and router.sketch is None and router.config.num_buckets == 256
    assert {(a.config.sink_size, a.config.window_size) for a in (router, phi)} == {(1, 2047)}
    assert router.config.provenance["options"]["max_steps"] == 2
    assert made.quality is not None and {s.selector for s in made.quality.settings} == {"router"}
    for spent in ({"token_budget": 8}, {"probes": 3}):
        with sparsekv.attach(make_model(), place / "saap", dense_below=0, **spent) as attachment:
            assert attachment.generate(prompt(2100), max_new_tokens=2).shape == (1, 2102)
            assert attachment.decoding.selector.name == "router" and attachment.report()["sparse_calls"]
