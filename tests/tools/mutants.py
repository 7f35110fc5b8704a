"""Plant small faults, one at a time, and say which of them the tests find.

    python tests/tools/mutants.py --json build/mutants.json --workers 2
    python tests/tools/mutants.py --json build/old.json --suite ../older-checkout/tests
    python tests/tools/mutants.py --only regions-sink phi-between
    python tests/tools/mutants.py --check

The faults stand in `mutants.toml`. The checkout is copied once; a fault is planted in the copy, pytest runs there, and
the file is put back. First come the tests nearest to the file, then, if they pass, all others. Before that the same
tests must pass without a fault, each run within `--timeout`: so a run that takes longer has found one. A call with
`--json` goes on where the last one stopped. The status is 0 however many are found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".toml")
LEFT_OUT = (".git", ".venv*", "__pycache__", ".hypothesis", ".*_cache", "build", "dist", "site", "*-output",
            "*.egg-info")


def read_table(only: list[str]) -> tuple[list[dict[str, str]], dict[str, list[str]]]:
    """The mutants, or those of these ids, and the tests near a beginning of a path. Ends with a sentence for an id that
    is unknown or stands twice, and for a fault that cannot be planted."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    mutants = table["mutant"]
    ids = [m["id"] for m in mutants]
    twice, unknown = sorted({i for i in ids if ids.count(i) > 1}), sorted(set(only) - set(ids))
    if twice or unknown:
        sys.exit(f"{TABLE.name} has ids twice: {twice}; ids that were asked for and are not there: {unknown}")
    chosen = [m for m in mutants if not only or m["id"] in only]
    for mutant in chosen:
        planted(mutant)
    return chosen, table["near"]


def planted(mutant: dict[str, str]) -> str:
    """The text of the file with the fault in it. Ends with a sentence where the snippet does not stand there once."""
    path = ROOT / mutant["file"]
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (count := text.count(mutant["find"])) != 1:
        sys.exit(f"mutant {mutant['id']}: its snippet stands {count} times in {mutant['file']}, expected once; bring "
                 f"{TABLE.name} up to date")
    changed = text.replace(mutant["find"], mutant["replace"])
    try:
        compile(changed, mutant["file"], "exec")
    except SyntaxError as error:
        sys.exit(f"mutant {mutant['id']} is no Python: {error}")
    return changed


def near(mutant: dict[str, str], table: dict[str, list[str]], tests: Path) -> list[str]:
    """The tests nearest to a mutant's file that the suite has: those of the longest beginning of its path."""
    beginning = max((x for x in table if mutant["file"].startswith(x)), key=len)
    return [f"tests/{name}" for name in table[beginning] if (tests / name).exists()]


def copied(suite: Path, into: Path) -> Path:
    """The checkout with the tests of `suite`."""
    tree = into / "tree"
    shutil.copytree(ROOT, tree, ignore=lambda folder, names: shutil.ignore_patterns(
        *LEFT_OUT, *(["tests"] if Path(folder) == ROOT else []))(folder, names))
    shutil.copytree(suite, tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def fingerprint(tree: Path) -> str:
    """A hash of all Python files: what a list of results is of."""
    found = hashlib.sha256()
    for path in sorted(tree.rglob("*.py")):
        found.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


class Suite:
    """Runs of pytest in the copy."""

    def __init__(self, tree: Path, workers: int, timeout: float):
        self.tree, self.timeout = tree, timeout
        self.how = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        if workers:
            self.how += ["-n", str(workers), "--dist", "worksteal"]

    def run(self, *what: str) -> tuple[str, float, str]:
        """`passed`, `failed` or `timeout`; seconds; the first test that failed, or the output's last line. Ends with a
        sentence where pytest itself could not run."""
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        start = time.monotonic()
        process = subprocess.Popen(
            [*self.how, *what], cwd=self.tree, env={**os.environ, "PYTHONPATH": str(self.tree)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            return "timeout", time.monotonic() - start, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
        seconds = time.monotonic() - start
        if process.returncode in (3, 4, 5):  # its own error, its usage, no tests
            sys.exit(f"pytest {' '.join(what)} ended with status {process.returncode}:\n{output[-2000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        last = failed[0] if failed else (output.strip().splitlines() or [""])[-1]
        return "failed" if process.returncode else "passed", seconds, last

    def must_pass(self, *what: str) -> float:
        """Seconds that the tests take without a fault. Ends with a sentence where they fail or take too long."""
        verdict, seconds, last = self.run(*what)
        if verdict != "passed":
            sys.exit(f"without any fault: {verdict} after {seconds:.0f} s, {last}; expected {' '.join(what) or 'all'} "
                     f"to pass within --timeout {self.timeout:.0f}")
        return seconds


def judged(
    mutant: dict[str, str], suite: Suite, first: list[str], clean: dict[str, float], keep: Callable[[], None],
) -> dict[str, Any]:
    """Where a mutant is found, and by which test. clean: seconds of what has passed without a fault, by its name, which
    grows; keep: called when it has."""
    path = suite.tree / mutant["file"]
    sound = path.read_text(encoding="utf-8")
    spent = 0.0
    rest = [f"--ignore={name}" for name in first]
    for stage, what, name, before in (("near", first, " ".join(first), first), ("rest", rest, "all", [])):
        if stage == "near" and not first:
            continue
        if name not in clean:
            clean[name] = suite.must_pass(*before)
            keep()
        path.write_text(planted(mutant), encoding="utf-8")
        try:
            verdict, seconds, by = suite.run(*what)
        finally:
            path.write_text(sound, encoding="utf-8")
        spent += seconds
        if verdict != "passed":
            return {"found": True, "stage": stage, "by": by or verdict, "seconds": round(spent, 1)}
    return {"found": False, "stage": "", "by": "", "seconds": round(spent, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants; without it all")
    parser.add_argument("--suite", type=Path, default=ROOT / "tests", help="a folder of tests; this checkout's")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest-xdist; 0: none")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of a run of pytest, at most")
    parser.add_argument("--json", type=Path, help="results, written as they come; those it has are kept")
    parser.add_argument("--check", action="store_true", help="only say whether all faults can be planted")
    options = parser.parse_args()
    mutants, table = read_table(options.only)
    if not (options.suite / "conftest.py").is_file():
        sys.exit(f"{options.suite} has no conftest.py; expected the tests folder of a checkout")
    if options.check:
        print(f"{len(mutants)} mutants can be planted")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copied(options.suite, Path(folder))
        record: dict[str, Any] = {"tree": fingerprint(tree), "clean": {}, "mutants": {}}
        if options.json and options.json.is_file():
            kept = json.loads(options.json.read_text(encoding="utf-8"))
            if kept["tree"] != record["tree"]:
                sys.exit(f"{options.json} is of another state of code or tests; give another file, or remove it")
            record = kept

        def keep() -> None:
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                new = options.json.with_suffix(".new")
                new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                new.replace(options.json)

        suite = Suite(tree, options.workers, options.timeout)
        for mutant in mutants:
            one = record["mutants"].get(mutant["id"])
            if one is None or one["replace"] != mutant["replace"]:
                one = judged(mutant, suite, near(mutant, table, tree / "tests"), record["clean"], keep)
                record["mutants"][mutant["id"]] = {**mutant, **one}
                keep()
            verdict = "found" if one["found"] else "SURVIVED"
            print(f"{verdict:<9}{mutant['id']:<21}{one['seconds']:>8.1f} s  {one['by']}", flush=True)
        found = sum(record["mutants"][m["id"]]["found"] for m in mutants)
        print(f"{found} of {len(mutants)} found")


if __name__ == "__main__":
    main()
