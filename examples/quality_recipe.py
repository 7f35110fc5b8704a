"""The quality table for the completion paper's own models, for whoever has their weights and one large GPU.

    python examples/quality_recipe.py --text BOOKS.txt --output recipe             # runs everything, hours
    python examples/quality_recipe.py --text BOOKS.txt --output recipe --dry-run   # only prints the commands
    python examples/quality_recipe.py --output recipe --table                      # only draws the table again

For every model and length: capture, train a router and feature maps at that length (as the paper does), answer RULER's
13 tasks at 1 to 5 % with worst-case accounting, and put what came out beside the paper's figures (its tables 1, 2 and
4; points of 100). Finished steps are not repeated. What has not been run stays empty.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

MODELS = ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-1.7B")
LENGTHS = (4096, 8192, 16384)
BUDGETS = (0.01, 0.02, 0.03, 0.04, 0.05)
# method -> points by length, then by budget from the largest down; the paper's "–" are left out
PAPER = {
    MODELS[0]: {
        "full": {4096: [80.5], 8192: [74.3], 16384: [66.5]},
        "topk": {4096: [79.0, 78.3, 77.6, 76.1], 8192: [73.6, 73.2, 72.7, 71.4, 69.1],
                 16384: [64.6, 64.3, 63.6, 62.7, 60.6]},
        "topk+phi": {4096: [79.2, 78.7, 78.1, 77.4], 8192: [73.5, 73.4, 73.0, 72.5, 71.4],
                     16384: [65.5, 65.3, 64.7, 64.1, 63.0]},
        "quest": {4096: [54.1, 51.2, 47.7, 39.0], 8192: [51.2, 48.7, 44.4, 38.0, 25.4],
                  16384: [43.3, 40.6, 37.9, 33.5, 24.3]},
        "magicpig": {4096: [68.1, 69.9, 72.1, 60.0], 8192: [62.5, 64.2, 66.8, 55.8, 49.0],
                     16384: [53.6, 55.5, 58.3, 46.8, 41.2]},
        "snapkv": {4096: [40.8, 35.8, 30.2, 20.5], 8192: [42.7, 40.3, 35.8, 29.3, 16.6],
                   16384: [36.8, 35.5, 33.8, 30.5, 22.1]},
    },
    MODELS[1]: {
        "full": {4096: [89.1], 8192: [85.5], 16384: [82.5]},
        "topk": {4096: [88.9, 88.6, 88.4], 8192: [85.3, 85.3, 85.0, 84.5], 16384: [82.8, 82.8, 82.8, 82.9, 82.4]},
        "topk+phi": {4096: [88.4, 88.2, 88.0], 8192: [84.8, 84.7, 84.4, 84.1], 16384: [82.4, 82.5, 82.7, 83.0, 81.8]},
        "quest": {4096: [58.1, 52.5, 47.0], 8192: [60.4, 57.4, 51.3, 42.3], 16384: [59.2, 54.5, 47.5, 40.4, 29.9]},
        "magicpig": {4096: [83.3, 84.2, 84.6], 8192: [79.7, 80.8, 81.7, 74.3], 16384: [75.5, 77.2, 77.5, 72.1, 63.7]},
        "snapkv": {4096: [42.6, 35.4, 29.5], 8192: [48.8, 46.5, 41.1, 32.2], 16384: [46.6, 44.0, 40.8, 36.6, 26.0]},
    },
}
MEASURED = ("streaming", "topk", "topk+phi", "router", "router+phi", "quest", "magicpig", "snapkv", "pyramidkv")
METHODS = ("full", "topk", "topk+phi", "router", "router+phi", "quest", "magicpig", "snapkv")


def commands(model: str, length: int, text: str, output: Path, samples: int) -> list[tuple[Path, list[str]]]:
    """The steps of one model and length, each with the folder it makes."""
    folder = output / model.split("/")[-1] / str(length)
    capture, router, phi, results = (folder / name for name in ("capture", "router", "phi", "eval"))
    return [
        (capture, ["capture", "--model", model, "--corpus", text, "--output", str(capture), "--context-length",
                   str(length), "--num-documents", "64", "--queries-per-document", "256", "--dtype", "bfloat16"]),
        (router, ["train-router", "--capture", str(capture), "--output", str(router), "--num-buckets", str(length // 8),
                  "--layer-group", "4"]),
        (phi, ["train-phi", "--capture", str(capture), "--output", str(phi), "--max-steps", "6000", "--layer-group",
               "4"]),
        (results, ["eval", "--model", model, "--output", str(results), "--router", str(router), "--phi", str(phi),
                   "--tasks", "ruler", "--lengths", str(length), "--samples", str(samples), "--methods",
                   ",".join(MEASURED), "--budgets", ",".join(map(str, BUDGETS)), "--accounting", "worst_case",
                   "--dtype", "bfloat16", "--resume"]),
    ]


def measured(output: Path, model: str, length: int) -> dict[tuple[str, float | None], float]:
    """(method, budget) -> points, from what `sparsekv eval` wrote; empty where it has not run."""
    path = output / model.split("/")[-1] / str(length) / "eval" / "results.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {(r["method"], r["budget"]): r["value"] for r in rows
            if r["case"] == f"ruler@{length}" and r["metric"] == "score" and r["value"] is not None}


def draw(output: Path) -> str:
    """Markdown: for every model and length a column of the paper and one of this project for each budget."""
    parts = ["# RULER, points of 100: the paper's figure / this project's"]
    for model in MODELS:
        for length in LENGTHS:
            found = measured(output, model, length)
            lines = [["method", *(f"{b:.0%}" for b in BUDGETS)], ["---"] + ["---:"] * len(BUDGETS)]
            for method in METHODS:
                paper = PAPER[model].get(method, {}).get(length, [])
                cells = []
                for i, budget in enumerate(reversed(BUDGETS)):
                    theirs = paper[0] if method == "full" else paper[i] if i < len(paper) else None
                    ours = found.get((method, None if method == "full" else budget))
                    cells.append(" / ".join("–" if x is None else f"{x:.1f}" for x in (theirs, ours)))
                lines.append([method, *reversed(cells)])
            parts += [f"## {model}, {length} tokens", "\n".join("| " + " | ".join(x) + " |" for x in lines)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="books.txt", help="training text: a file, a glob or a Hugging Face data set")
    parser.add_argument("--output", type=Path, default=Path("recipe"))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for model in MODELS if not options.table else ():
        for length in LENGTHS:
            for made, words in commands(model, length, options.text, options.output, options.samples):
                if options.dry_run:
                    print("sparsekv " + shlex.join(words))
                elif not made.with_suffix(".done").exists():
                    subprocess.run([sys.executable, "-m", "sparsekv.cli", *words], check=True)
                    made.with_suffix(".done").touch()
    if not options.dry_run:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "quality.md").write_text(draw(options.output), encoding="utf-8")
        print(draw(options.output))


if __name__ == "__main__":
    main()
