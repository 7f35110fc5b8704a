"""The import rules of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "sparsekv"
FILES = sorted(ROOT.rglob("*.py"))
STAGES = ("capture", "trainers", "runtime", "evaluation")
LEAVES = ("core", "models", "kernels", "artifacts", "capture.store", "capture.corpus", "capture.synthetic", "util")
ALLOWED = {"kernels": ("kernels", "util.errors"),
           "core": ("core", "kernels", "util.config", "util.errors"),
           "util": ("util",)}
"""What these leaves import of the package, and nothing else."""
LAZY = ("triton", "faiss", "lightning", "lm_eval", "datasets", "matplotlib")
DOORS = ("__main__", "cli", "trainers.pipeline", "trainers.estimate", "evaluation.demo",
         "evaluation.demo_report", "util.doctor", "artifacts.inspection")
"""The commands, which put stages together; nothing else imports them."""
TRANSFORMERS = {
    "runtime.hf.attention": "attention and mask function", "runtime.hf.forward": "what a forward returns",
    "runtime.hf.cache": "its caches",
    "runtime.hf.sliding": "its caches' layers with a window", "runtime.hf.supported": "its caches and what it compiles",
    "artifacts.hub.spoken": "what its errors say",
    "runtime.hf.generate": "its streamer", "capture.tap": "attention calls that are shown", "capture.run": "its caches",
    "trainers.estimate": "a model's shape without weights", "artifacts.hub.models": "models by name"}
"""All that import transformers, and for what; table of docs/architecture.md."""
INTERNALS = {
    "_attn_implementation": {"runtime.hf.attached", "runtime.hf.attention", "runtime.hf.model_pass", "capture.tap"},
    "_forward_pre_hooks": {"runtime.hf.attached", "runtime.hf.model_pass"},
    "register_forward_pre_hook": {"runtime.hf.attached", "capture.tap"},
    '"position_embeddings"': {"runtime.hf.attached", "runtime.hf.attention", "capture.tap"},
    "generation_config": {"runtime.hf.generate_hook", "runtime.hf.attach", "artifacts.hub.models",
                          "evaluation.evaluator"}}
"""What is transformers' own, and the only files that speak of it."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path, *, top_only: bool = False) -> list[str]:
    """Full names of what a file imports; `from a import b` counts as `a.b`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


ROOMS = ("cli", "evaluation", "trainers", "runtime", "capture", "artifacts", "models", "core", "kernels", "util")
"""The nine rooms below the command line; each imports those behind it alone."""


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_leaf(name: str) -> bool:
    return any(inside(name, leaf) for leaf in LEAVES)


def stage_of(name: str) -> str | None:
    return None if is_leaf(name) else next((s for s in STAGES if inside(name, s)), None)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_data_moves_to_the_right(path: Path) -> None:
    me = module_of(path)
    own = [n.removeprefix("sparsekv.") for n in imports(path) if n.startswith("sparsekv.")]
    if any(inside(me, door) for door in DOORS):
        return
    for leaf, allowed in ALLOWED.items():
        if inside(me, leaf):
            strange = [n for n in own if not any(inside(n, x) for x in allowed)]
            assert not strange, f"{me} imports {', '.join(strange)}; {leaf} may import {', '.join(allowed)}"
    for name in own:
        assert not any(inside(name, door) for door in DOORS), f"{me} imports a command ({name})"
        stage = stage_of(name)
        if is_leaf(me):
            assert stage is None, f"the leaf {me} imports the stage {stage} ({name})"
        elif stage is not None and stage != stage_of(me):
            decodes = stage_of(me) == "evaluation"
            allowed = me == "__init__" or me == "" or (decodes and stage == "runtime")
            assert allowed, f"the stage file {me} imports the stage {stage} ({name})"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """By imports at the top of files; of kernels also by those inside calls, where they stand for imports at the top
    that would be slow."""
    modules = {module_of(path): path for path in FILES}

    def imported(name: str) -> str:
        """The module that a full name is, or that it is a name of."""
        name = name.removeprefix("sparsekv").removeprefix(".")
        return name if name in modules else name.rpartition(".")[0]

    def needed(me: str, path: Path) -> list[str]:
        late = [n for n in imports(path) if inside(me, "kernels") or imported(n).endswith("_triton")]
        return [n for n in [*imports(path, top_only=True), *late] if inside(n, "sparsekv")]

    graph = {me: {imported(n) for n in needed(me, path)} - {me} for me, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def picture() -> str:
    """A line a room: the rooms that its files import, the commands left out, which put rooms together by name."""
    from sparsekv.cli import COMMANDS

    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    found["cli"] = {row.module.split(".")[1] for row in COMMANDS.values()}
    for path in FILES:
        me = module_of(path)
        if me.partition(".")[0] in ROOMS[1:] and not any(inside(me, door) for door in DOORS):
            found[me.partition(".")[0]] |= {n.split(".")[1] for n in imports(path) if n.startswith("sparsekv.")}
    for place, room in enumerate(ROOMS):
        found[room] &= {*ROOMS} - {room}
        above = found[room] - {*ROOMS[place:]}
        assert not above, f"{room} imports {', '.join(above)}, which lies above it"
    return "\n".join(f"{room:<10} → {' '.join(r for r in ROOMS if r in found[room])}".rstrip(" →") for room in ROOMS)


def test_no_room_imports_upwards_and_the_page_has_the_picture() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"```\n{picture()}\n```" in page, picture()


@pytest.mark.parametrize("path", [p for p in FILES if inside(module_of(p), "runtime")], ids=module_of)
def test_the_adapters_do_not_know_each_other_nor_the_runtime_them(path: Path) -> None:
    others = [a for a in ("runtime.hf", "runtime.vllm") if not inside(module_of(path), a)]
    known = [n for n in imports(path) if any(inside(n, f"sparsekv.{other}") for other in others)]
    assert not known, f"{module_of(path)} imports {', '.join(known)}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_heavy_packages_are_imported_inside_calls(path: Path) -> None:
    found = {n.split(".")[0] for n in imports(path, top_only=True)} & set(LAZY)
    if _imported_lazily(module_of(path)):  # a file of kernels, or of Lightning's classes
        found -= {"triton", "lightning"}
    assert not found, f"{module_of(path)} imports {found} at its top"


def _imported_lazily(module: str) -> bool:
    """No file imports this module at its own top, but kernels theirs: it is reached only inside a call."""
    return not any(inside(name, f"sparsekv.{module}") for path in FILES if not path.stem.endswith("_triton")
                   for name in imports(path, top_only=True))


@pytest.mark.parametrize("path", [path for path in FILES if inside(module_of(path), "artifacts")
                                  and not inside(module_of(path), "artifacts.hub")], ids=module_of)
def test_artifacts_neither_draw_nor_fetch(path: Path) -> None:
    found = {n.split(".")[0] for n in imports(path)} & {"matplotlib", "huggingface_hub", "requests", "urllib", "http"}
    assert not found, f"{module_of(path)} imports {found}: artifacts/hub/ draws its page and fetches it"


def test_what_touches_transformers_stands_in_one_file_each() -> None:
    found = {module_of(path) for path in FILES if any(inside(n, "transformers") for n in imports(path))}
    assert found == set(TRANSFORMERS)
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## What touches transformers"):]
    for module in (*TRANSFORMERS, *(m for modules in INTERNALS.values() for m in modules if "evaluation" not in m)):
        assert f"`{module.replace('.', '/')}.py`" in section, f"docs/architecture.md does not name {module}"
    for word, modules in INTERNALS.items():
        strange = {module_of(path) for path in FILES if word in path.read_text(encoding="utf-8")} - modules
        assert not strange, f"{', '.join(sorted(strange))} speak of {word}; only {', '.join(sorted(modules))} may"


def test_no_file_of_the_runtime_is_long() -> None:
    long = [p.name for p in (ROOT / "runtime").rglob("*.py") if len(p.read_text(encoding="utf-8").splitlines()) > 320]
    assert not long, f"{', '.join(long)} of runtime/ are above 320 lines"


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    code = ("import sys, sparsekv; assert sparsekv.__version__; "
            "print([m for m in ('torch', 'transformers', 'triton', 'faiss', 'lightning', 'datasets', 'matplotlib') "
            "if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_attach_loads_no_optional_package() -> None:
    code = ("import sys; from sparsekv import attach; import sparsekv.kernels; "
            "print([m for m in ('faiss', 'lightning', 'lm_eval', 'datasets', 'matplotlib') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]", out.stdout
