"""Artifacts by name: a folder here, a training that ships (`shipped.TRAINED`), or a repository of the Hugging Face hub.

A name is a path where something lies there. Else it is one of the hub's if it reads `user/name`, or
`user/name@revision`; nothing else is ever looked for in the network. A folder or repository holds one artifact, or a
training: `router/`, `phi/` or both. Cache, address and token are huggingface_hub's own: `HF_HOME`, `HF_HUB_OFFLINE`,
`HF_ENDPOINT`, `HF_TOKEN`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sparsekv.artifacts.checks import brief
from sparsekv.artifacts.format import CONFIG, TENSORS, read_config
from sparsekv.artifacts.hub.network import in_time, refused
from sparsekv.artifacts.hub.shipped import TRAINED, trained
from sparsekv.util.errors import SparseKVError
from sparsekv.util.progress import hide

KINDS = ("router", "phi")
OWN = tuple(f"{folder}{file}" for folder in ("", *(f"{kind}/" for kind in KINDS)) for file in (CONFIG, TENSORS))
"""Files of a repository that are artifacts'."""
QUALITY = "quality.json"
"""The quality card of a training on text."""
REPOSITORY = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[^@\s]+))?")


def on_hub(name: str) -> bool:
    """True for a name that is no path here and can be a repository of the hub: `user/name`, where no folder here is
    called `user`. A path that is misspelt is asked of nobody."""
    return REPOSITORY.fullmatch(name) is not None and not Path(name).parent.is_dir()


def find_artifact(name: str | Path, kind: str, revision: str | None = None) -> Path:
    """The folder of the artifact of this kind; of a repository, its place in the hub's cache. revision: a branch, tag
    or commit of the repository, as `@` in its name.

    Raises SparseKVError where there is none, for what is no artifact, and for a hub that cannot be reached or refuses.
    """
    return find_artifacts(name, (kind,), revision)[kind]


def find_folder(name: str) -> Path:
    """The folder, here or in the hub's cache, of what is no path: a training that ships, or a repository. Raises
    SparseKVError as `find_artifact`."""
    if not trained(name) and not on_hub(name):
        raise SparseKVError(f"nothing at {name!r}: expected the folder of a capture store or an artifact, "
                            f"{', '.join(TRAINED)}, or a repository of the hub as user/name")
    found = list(find_artifacts(name).values())
    return found[0] if len(found) == 1 else found[0].parent


def find_artifacts(
    name: str | Path, kinds: Sequence[str] = (), revision: str | None = None,
) -> dict[str, Path]:
    """Find artifacts of all `kinds`, as `find_artifact` finds one; without `kinds`, those that there are."""
    try:
        there = isinstance(name, Path) or Path(name).exists()
    except OSError as error:
        raise SparseKVError(f"no artifact can lie at {brief(str(name))} ({error.strerror}); expected a folder, or a "
                            "repository of the hub as user/name") from error
    remote = REPOSITORY.fullmatch(str(name)) if not there and on_hub(str(name)) else None
    if remote is None:
        if revision is not None:
            raise SparseKVError(f"revision {revision!r} was given for {brief(str(name))}, which is a path; expected a "
                                "repository of the hub, as user/name")
        root = (not there and trained(str(name))) or Path(name)
        return _wanted(name, _there(root), kinds, root)
    if revision is not None and remote["revision"] not in (None, revision):
        raise SparseKVError(f"{name!r} names one revision and revision={revision!r} another; give one of them")
    repo, revision = remote["repo"], revision or remote["revision"]
    root = fetch(repo, revision, [QUALITY, *(file for file in OWN if file.endswith(CONFIG))])
    found = _wanted(name, _there(root, name), kinds, root)
    fetch(repo, root.name, [(folder.relative_to(root) / TENSORS).as_posix() for folder in found.values()])
    return found


def _there(root: Path, name: str | Path | None = None) -> dict[str, Path]:
    """What lies in a folder, by kind. Raises SparseKVError where that is no artifact."""
    parts = {kind: root / kind for kind in KINDS if (root / kind / CONFIG).is_file()}
    if parts and not (root / CONFIG).is_file():
        return parts
    if name is not None and not (root / CONFIG).is_file():
        raise SparseKVError(f"{name!r} on the hub is not an artifact of sparsekv; expected {CONFIG} and {TENSORS}, or "
                            f"{' and '.join(f'{kind}/' for kind in KINDS)} with them")
    return {read_config(root)["kind"]: root}


def _wanted(name: str | Path, there: dict[str, Path], kinds: Sequence[str], root: Path) -> dict[str, Path]:
    for kind in kinds:
        if kind not in there:
            alone = root in there.values()
            what = f"is a {next(iter(there))!r} artifact" if alone else f"holds {', '.join(there)}"
            raise SparseKVError(f"{str(name)!r} {what}; expected a {kind!r} artifact")
    return {kind: there[kind] for kind in kinds} if kinds else there


def fetch(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    """Those of the files that a repository has, in the hub's cache; returns the folder of that commit.

    Raises SparseKVError: one sentence for every way in which a hub can fail."""
    from huggingface_hub import snapshot_download

    from sparsekv import __version__

    hide()  # the hub's client draws its own bars
    try:
        with in_time():
            return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files), library_name="sparsekv",
                                          library_version=__version__))
    except Exception as error:  # whatever huggingface_hub, httpx or the disk raise
        raise refused(error, repo, revision, "fetch") from error
