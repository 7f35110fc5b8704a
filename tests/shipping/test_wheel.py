"""The wheel and the source distribution, installed and run where no source tree is."""

import json
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from sparsekv import __version__
from sparsekv.artifacts.hub.named import KINDS, OWN
from sparsekv.artifacts.hub.shipped import TRAINED
from sparsekv.cli import COMMANDS

ROOT = Path(__file__).parents[2]
SMALLEST = ("--context-length 256 --num-documents 4 --num-heldout 1 --num-needles 1 --num-buckets 8 --phi-steps 2 "
            "--phi-width 8").split()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Wheel and source distribution, of a copy: setuptools writes beside what it builds."""
    root = tmp_path_factory.mktemp("built")
    source = root / "source"
    shutil.copytree(ROOT / "sparsekv", source / "sparsekv", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", root / "dist", source], check=True,
                   capture_output=True)
    wheel, = (root / "dist").glob("*.whl")
    archive, = (root / "dist").glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Path:
    """The bin folder of a new environment with the wheel in it; what the wheel needs is lent by this environment."""
    root = tmp_path_factory.mktemp("clean")
    venv.create(root, with_pip=True)
    python = root / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", built[0]], check=True)
    inside = next((root / "lib").glob("python*/site-packages"))
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    (inside / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return root / "bin"


def run(command: list, where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert not done.returncode, done.stderr
    return done.stdout


def test_both_carry_the_version_the_license_and_the_types(built) -> None:
    wheel, archive = built
    names = zipfile.ZipFile(wheel).namelist()
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert f"\nVersion: {__version__}\n" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "sparsekv/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "sparsekv").rglob("*.py")}
    assert modules <= set(names) and "sparsekv/capture/texts/addresses.jsonl.gz" in names
    trained = {f"sparsekv/artifacts/trained/{name}/{file}" for name in TRAINED for file in OWN
               if file.startswith(KINDS)}
    assert trained and trained <= set(names)
    packed = tarfile.open(archive).getnames()
    assert {f"sparsekv-{__version__}/{m}" for m in (*modules, "sparsekv/py.typed")} <= set(packed)


def test_the_installed_package_is_the_wheels(clean, tmp_path) -> None:
    code = ("import importlib.metadata, sparsekv; "
            "print(sparsekv.__file__, sparsekv.__version__, importlib.metadata.version('sparsekv'))")
    place, *versions = run([clean / "python", "-c", code], tmp_path).split()
    assert Path(place).is_relative_to(clean.parent) and versions == [__version__] * 2


def test_the_command_lists_its_commands(clean, tmp_path) -> None:
    said = run([clean / "sparsekv", "--help"], tmp_path)
    assert all(name in said for name in COMMANDS)
    assert json.loads(run([clean / "sparsekv", "doctor", "--json"], tmp_path))["versions"]["sparsekv"] == __version__


def test_the_demo_runs(clean, tmp_path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from tiny import save_model

    save_model(tmp_path / "model")
    said = run([clean / "sparsekv", "demo", "--model", tmp_path / "model", "--output", "out", *SMALLEST], tmp_path)
    assert "full attention" in said and (tmp_path / "out" / "report.html").is_file()
