"""The steps of CONTRIBUTING, followed in a copy of the repository as a new contributor would: the selector of
docs/selector.md, the kernel of `toy/`, and a model family that the table does not have. The quick suite makes
the changes and looks up all names; `slow` runs what was added. What needs a GPU is left out: a case in
`benchmarks/decode.py`, and the cases of a GPU."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from test_code_blocks import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TOY = Path(__file__).parent / "toy"
SELECTOR, CLASS, OP, FAMILY = "every_third", "EveryThird", "scaled", "arcee"
COPIED = ("sparsekv", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")


class Steps(NamedTuple):
    """A section of CONTRIBUTING, its placeholders filled in."""

    text: str

    def command(self, begins: str) -> list[str]:
        """The command of a step that begins so; Python is the one that runs."""
        found = re.search(rf"`python ({re.escape(begins)}[^`]*)`", self.text)
        assert found is not None, begins
        return [sys.executable, *shlex.split(found[1])]

    def paths(self) -> list[str]:
        """Files that the steps name."""
        return [p for p in re.findall(r"`([\w/]+/[\w/.]+\.\w+)`", self.text)]


def steps(section: str, **names: str) -> Steps:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    assert re.search(r"^\d+\. ", text, re.MULTILINE), section
    for placeholder, name in names.items():
        text = re.sub(rf"(?<![A-Za-z]){placeholder}(?![A-Za-z])", name, text)
    return Steps(text)


def insert(file: Path, before: str, text: str) -> None:
    """Put text into a file, ahead of what stands there once."""
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1, (file, before)
    file.write_text(content.replace(before, text + before), encoding="utf-8")


def add_selector(tree: Path) -> None:
    """Steps 1 to 5. The page registers its class itself; here the class is a file of the package and has a row."""
    code = blocks(ROOT / "docs" / "selector.md")[0].code
    code = re.sub(r"^(from sparsekv\.core\.registry .*|register\(.*)\n", "", code, flags=re.MULTILINE)
    code = code.replace("from sparsekv.core.selectors import", "from sparsekv.core.selectors.base import")
    code = code.replace("(Selector):\n", '(Selector):\n    """Every third token of the mid region (no paper)."""\n\n')
    section = steps("A selector", NAME=SELECTOR, Class=CLASS)
    file = re.search(r"`(sparsekv/core/selectors/\w+\.py)`", section.text)
    row = re.search(r"`(SelectorRow\(.*?\))`", section.text)
    assert file is not None and row is not None
    (tree / file[1]).write_text(f'"""A toy."""\n\nfrom __future__ import annotations\n\n{code.strip()}\n')
    row_code = row[1].replace("reads, source", '"every third token", "this project"')
    insert(tree / "sparsekv/core/registry.py", '    EstimatorRow("centroid",', f"    {row_code},\n")


def add_kernel(tree: Path) -> None:
    """Steps 1 to 7 and 9."""
    kernels, tests = tree / "sparsekv" / "kernels", tree / "tests" / "kernels"
    for file in TOY.glob("*.py"):
        shutil.copy(file, kernels)
    insert(kernels / "__init__.py", "from sparsekv.kernels.sketch import",
           f"from sparsekv.kernels.{OP} import {OP}\n")
    insert(kernels / "__init__.py", '    "silu_product",\n', f'    "{OP}",\n')
    insert(tree / "docs" / "kernels.md", "| `rms_norm`", f"| `{OP}` | `{OP}.py` | a tensor times a number |\n")
    insert(tests / "checks.py", "from sparsekv.kernels.stored import (",
           f"from sparsekv.kernels.{OP} import launch_{OP}, {OP}_reference\n")
    insert(tests / "checks.py", "def check_few_rows(", f'''\
def check_{OP}(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Odd sizes, and none at all."""
    x = torch.randn(*shape, device=device, dtype=dtype)
    mine = launch_{OP}(x, 3.0)
    assert mine.dtype == dtype and error(mine, {OP}_reference(x.double(), 3.0)) < LIMITS[dtype]


''')
    insert(tests / "cases.py", "    check(checks.check_between,", f'''\
    check(checks.check_{OP}, "{OP}.{OP}", quick=[each([(3, 5, 71)], [F16])],
          slow=[each([(3, 5, 71)], [F32]), each([(1, 1), (0, 4)], INTERPRETED)],
          gpu=[each([(3, 5, 71), (1, 1), (0, 4)], ON_A_DEVICE)]),
''')
    compiled = tests / "compiled.py"
    insert(compiled, "from sparsekv.kernels import sketch_triton as sk\n",
           f"from sparsekv.kernels import {OP}_triton as sc\n")
    insert(compiled, "from sparsekv.runtime.vllm import seating\n",
           f"from sparsekv.kernels.{OP} import SCALE_WARPS, SCALED_AT_ONCE\n")
    insert(compiled, "    for length in (256, 2048, losses.LONGEST):\n",
           f'    build(sc.{OP}_kernel, {{"BLOCK": SCALED_AT_ONCE}}, SCALE_WARPS, "bf16", SHARED)\n')


def add_family(tree: Path) -> None:
    """Step 2."""
    insert(tree / "tests" / "reliability" / "families.py", '    "olmo": {},', f'    "{FAMILY}": {{}},\n')


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy with all three added."""
    folder = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        else:
            shutil.copy(ROOT / name, folder)
    add_selector(folder)
    add_kernel(folder)
    add_family(folder)
    return folder


def start(words: list[str], tree: Path, interprets: bool = False) -> subprocess.Popen[str]:
    """A command in the copy, with its package; interprets: kernels run as in tests on this machine."""
    clean = {k: v for k, v in os.environ.items() if interprets or k != "TRITON_INTERPRET"}
    clean = {k: v for k, v in clean.items() if not k.startswith("PYTEST_")}
    return subprocess.Popen(words, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=clean | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate()
    assert process.returncode == 0, out[-4000:]
    return out


COMPILES = f"""
import sys
sys.path.insert(0, "tests/kernels")
import compiled
found = compiled.answer("slow", "{OP}.{OP}")
assert found == {{"builds": 3, "failed": None}}, found
"""
"""Step 7 of a kernel, for this one alone."""
TESTED = (
    f"tests/core/test_equivalence.py::test_a_step_is_the_formulas_written_out[{SELECTOR}-none-3]",
    f"tests/core/test_equivalence.py::test_a_step_on_captured_tensors_is_that_of_the_runtime[{SELECTOR}-phi-1]",
    f"tests/kernels/test_interpreted.py::test_kernels[{OP}-(3, 5, 71)-float16]",
    f"tests/kernels/test_interpreted.py::test_kernels_of_all_shapes[{OP}-(0, 4)-float32]",
    "tests/kernels/test_every_kernel.py",
    "tests/documentation/test_methods.py::test_tables_of_methods_are_drawn_from_the_code",
    f"tests/test_imports.py::test_data_moves_to_the_right[core.selectors.{SELECTOR}]",
    f"tests/test_imports.py::test_heavy_packages_are_imported_inside_calls[kernels.{OP}]",
    f"tests/reliability/test_families_table.py::test_a_family_is_right_or_refused[{FAMILY}]",
    "tests/reliability/test_families_table.py::test_the_page_has_these_families")
"""Steps 7 of a selector, 6 of a kernel and 4 of a family, and the rules of imports."""
JUDGES = f"""
import sys
sys.path.insert(0, "tests/reliability")
import families, pytest
from benchmarks import _methods
_methods.write()
page = families.PAGE.read_text(encoding="utf-8")
lines = families.table(page)
row = families.row("{FAMILY}") + "\\n"
families.PAGE.write_text(page.replace(lines["olmo"], row + lines["olmo"]), encoding="utf-8")
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *{TESTED}]))
"""
"""Step 6 of a selector, step 3 of a family for this one alone, and what is tested: one process, which loads torch
once."""


def test_files_and_names_of_the_steps_are_there(tree: Path) -> None:
    sections = {"A selector": {"NAME": SELECTOR, "Class": CLASS}, "A kernel": {"OP": OP}, "A model family": {}}
    for section, names in sections.items():
        named = steps(section, **names).paths()
        assert named, section
        for path in named:
            assert (tree / path).is_file(), f"{section}: {path}"
    kernel = "".join(file.read_text() for file in TOY.glob("*.py"))
    named = re.findall(rf"`((?:launch_)?{OP}(?:_reference)?)`", steps("A kernel", OP=OP).text)
    assert {f"launch_{OP}", f"{OP}_reference", OP} <= set(named)
    for name in set(named):
        assert f"def {name}(" in kernel, name


@pytest.mark.slow
def test_the_steps_lead_to_a_selector_a_kernel_and_a_family(tree: Path) -> None:
    pytest.importorskip("triton")
    compiled = start([sys.executable, "-c", COMPILES], tree)
    ended(start([sys.executable, "-c", JUDGES], tree, interprets=True))
    ended(compiled)
    assert f"`{SELECTOR}`" in (tree / "docs" / "reference.md").read_text(encoding="utf-8")
    assert f"| `{FAMILY}` |" in (tree / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_steps_pass_to_the_letter(tree: Path) -> None:
    selector, family = steps("A selector", NAME=SELECTOR), steps("A model family", NAME=FAMILY)
    for command in (selector.command("benchmarks/pages.py"), selector.command("-m pytest"),
                    family.command("tests/reliability"), family.command("-m pytest"),
                    [sys.executable, "-m", "ruff", "check", "sparsekv", "tests", "benchmarks"]):
        ended(start(command, tree))
    assert f"| `{FAMILY}` |" in (tree / "docs" / "families.md").read_text(encoding="utf-8")
