"""`sparsekv push`: an artifact, or the artifacts of a training, to the Hugging Face hub."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from sparsekv.artifacts.checks import reason
from sparsekv.artifacts.format import CONFIG, TENSORS, load_artifact, read_config
from sparsekv.artifacts.hub.modelcard import README, card_files
from sparsekv.artifacts.hub.named import OWN, REPOSITORY, fetch, find_artifacts
from sparsekv.artifacts.hub.network import in_time, refused
from sparsekv.artifacts.hub.text_quality import FILE, checksums, parse_quality
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, printable
from sparsekv.util.progress import hide

METRICS = "metrics.csv"


@dataclass(frozen=True)
class PushConfig:
    artifact: Path = option(help="Folder of an artifact, or of a training with router/ and phi/.", argument=True,
                            metavar="ART")
    name: str = option(help="Its name on the hub, as user/name; the repository is made where there is none.",
                       argument=True, metavar="USER/NAME")
    private: bool = option(False, help="Make the repository private; an existing public one is refused.")
    revision: str | None = option(None, help="Branch to push to, made where there is none; without it main.")
    message: str | None = option(None, help="Message of the commit; without it it names the artifacts.")
    license: str | None = option(None, help="Licence in the page's metadata, as the hub writes it: apache-2.0, mit, …; "
                                            "without it none.")


class Pushed(NamedTuple):
    """Place of an artifact that was pushed."""

    name: str
    url: str

    def summary(self) -> str:
        return f'{self.url}\nwith sparsekv.attach(model, "{self.name}"):'


def push_artifact(config: PushConfig) -> Pushed:
    """The command. Raises SparseKVError as `push` does."""
    url = push(config.artifact, config.name, private=config.private, revision=config.revision, message=config.message,
               license=config.license)
    return Pushed(config.name + (f"@{config.revision}" if config.revision else ""), url)


def push(
    folder: str | Path, name: str, *, private: bool = False, revision: str | None = None, message: str | None = None,
    license: str | None = None,
) -> str:
    """Push what a folder holds, with its page, in one commit; returns the commit's address.

    name: `user/name`. Only what artifacts have is pushed: both files, the page and its figures, the metrics, and of a
    training what was measured on text. A page that nobody edited is written anew, with the repository's name. Raises
    SparseKVError for what is no sound artifact, a name that cannot be, a missing token, a repository of something else,
    and a hub that cannot be reached or refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

    from sparsekv import __version__

    found = find_artifacts(Path(folder))
    for path in found.values():
        load_artifact(path)
    part = REPOSITORY.fullmatch(name)
    if part is None or part["revision"]:
        raise SparseKVError(f"{name!r} is no name of a repository; expected user/name" + (
            ", and the revision apart" if part else ""))
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", license):
        raise SparseKVError(f"{license!r} is no licence that the hub knows; expected for example apache-2.0 or mit")
    if constants.HF_HUB_OFFLINE:
        raise SparseKVError("nothing can be pushed while HF_HUB_OFFLINE is set; unset it")
    if not get_token():
        raise SparseKVError(f"pushing to {constants.ENDPOINT} needs a token: set HF_TOKEN, or run `hf auth login`")
    files = _files(Path(folder), found, name, license)
    api = HfApi(library_name="sparsekv", library_version=__version__)
    hide()  # its client draws its own bars
    try:
        with in_time():
            made = api.create_repo(name, private=private or None, exist_ok=True)
            if private and not api.repo_info(made.repo_id).private:
                raise SparseKVError(f"{name!r} exists and is public; choose another name, or push without --private")
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            there = set(api.list_repo_files(name, revision=revision))
            _refuse_others(name, revision, there)
            operations: list[Any] = [CommitOperationAdd(place, data) for place, data in sorted(files.items())]
            operations += [CommitOperationDelete(place) for place in sorted(there & set(OWN) - set(files))]
            return printable(api.create_commit(name, operations, revision=revision,
                                               commit_message=message or f"sparsekv {', '.join(found)}").commit_url)
    except SparseKVError:
        raise
    except Exception as error:  # whatever huggingface_hub, httpx or the disk raise
        raise refused(error, name, revision, "push to") from error


class OnHub:
    """`load` and `save` by the names that Hugging Face's libraries have for them, and the way to the hub."""

    save: Callable[..., None]
    load: Callable[..., Any]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Do what `save` does, under the hub's name."""
        self.save(save_directory)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> Self:
        """Do what `load` does, under the hub's name."""
        return cast(Self, cls.load(name, revision))

    def push_to_hub(
        self, name: str, *, private: bool = False, revision: str | None = None, message: str | None = None,
        license: str | None = None,
    ) -> str:
        """Push the artifact with its page to the repository `user/name` of the hub, made where there is none; returns
        the address of the commit. Raises SparseKVError as `sparsekv.artifacts.hub.push.push`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            return push(folder, name, private=private, revision=revision, message=message, license=license)


def _refuse_others(name: str, revision: str | None, there: set[str]) -> None:
    """Raises SparseKVError for a repository that holds another library's model."""
    if CONFIG not in there and TENSORS not in there:
        return
    try:
        read_config(fetch(name, revision, [CONFIG]))
    except SparseKVError as error:
        raise SparseKVError(f"{name!r} holds something else than artifacts of sparsekv ({reason(error)}); choose "
                            "another name") from error


def _files(folder: Path, found: dict[str, Path], name: str, license: str | None) -> dict[str, Any]:
    """What is pushed: bytes, or the path of a file, by its place in the repository."""
    configs = {kind: read_config(path) for kind, path in found.items()}
    files: dict[str, Any] = {}
    for path in found.values():
        files |= {file.relative_to(folder).as_posix(): str(file) for file in (path / CONFIG, path / TENSORS)}
        if (metrics := _own_file(path / METRICS)) is not None:
            files[(path / METRICS).relative_to(folder).as_posix()] = metrics
    nested = folder not in found.values()
    quality = _own_file(folder / FILE) if nested else None
    text = None if quality is None else parse_quality(quality, repr(str(folder / FILE)))
    if text is not None and text.artifacts != checksums(configs):
        raise SparseKVError(f"{str(folder / FILE)!r} was measured with other artifacts than lie beside it; remove it, "
                            "and `sparsekv train` with the options of that training measures anew")
    if quality is not None:
        files[FILE] = quality
    made = card_files(configs, nested=nested, text=text)
    card = {place: _own_file(folder / place) or data for place, data in made.items()}
    if card[README] == made[README]:
        card[README] = card_files(configs, nested=nested, name=name, text=text)[README]
    if license is not None:
        card[README] = _licensed(card[README], license)
    return files | card


def _own_file(file: Path) -> bytes | None:
    """What a file beside an artifact holds; None where there is none. Raises SparseKVError for a link, which may lead
    to what nobody meant to push, and for what is no file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "a link" if file.is_symlink() else f"not to be read ({error.strerror})"
        raise SparseKVError(f"{str(file)!r} is {what}; put the file itself there, or remove it: push makes the page "
                            "anew") from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SparseKVError(f"{str(file)!r} is no file; remove it: push makes the page anew")
        return opened.read()


def _licensed(text: bytes, license: str) -> bytes:
    """The page with this licence in its metadata."""
    from huggingface_hub import ModelCard

    card = ModelCard(text.decode("utf-8"), ignore_metadata_errors=True)
    card.data["license"] = license
    return str(card).encode()

