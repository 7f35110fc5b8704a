"""Requests: prompts with their targets in a plain file, so that one machine makes them and another answers them.

The file is JSON lines (gzip where the name ends in .gz): a header, then one request a line. Making requests needs
lm-eval and the task's data; answering and scoring RULER needs neither.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import io
import itertools
import json
import logging
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from sparsekv.util.disk import placed
from sparsekv.util.errors import SparseKVError, first_line

FORMAT, FORMAT_VERSION = "sparsekv-requests", 2
OWN_TASKS = ("needle", "perplexity")
"""Made from a corpus by `own_tasks`, without lm-eval."""
RULER_OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""RULER tasks that lm-eval generates without downloading anything: the default set."""
RULER_ONLINE = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery",
                "ruler_qa_squad", "ruler_qa_hotpot")
DATA = {"ruler_qa_squad": "SQuAD v2", "ruler_qa_hotpot": "HotpotQA",
        **dict.fromkeys(RULER_ONLINE[:5], "Paul Graham's essays")}
"""What a task that is not offline downloads."""
RULER_DATA = {"essay": "PaulGrahamEssays.json", "squad": "squad.json", "hotpot": "hotpotqa.json"}
"""The same as files, of RULER's own `scripts/data/synthetic/json`."""
BABILONG = tuple(f"babilong_qa{i}" for i in range(1, 6))
BABILONG_SIZES = {1024 * 2**i: f"{2**i}k" for i in range(8)}
"""Lengths that BABILong comes in, and its names for them."""
INFINITEBENCH = tuple(f"infinitebench_{name}" for name in (
    "passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find", "longdialogue_qa_en",
    "longbook_qa_en", "longbook_sum_en", "longbook_choice_en", "longbook_qa_chn"))
DATA |= {**dict.fromkeys(BABILONG, "RMT-team/babilong-1k-samples"),
         **dict.fromkeys(INFINITEBENCH, "xinrongzhang2022/InfiniteBench")}
SUITES = {"ruler": RULER_OFFLINE + RULER_ONLINE, "ruler-offline": RULER_OFFLINE, "babilong": BABILONG,
          "infinitebench": INFINITEBENCH}


TOKENS_NEEDED = {"niah_single_1": 24, "niah_single_2": 24, "niah_single_3": 48, "niah_multikey_1": 24,
                 "niah_multikey_2": 24, "niah_multikey_3": 48, "niah_multivalue": 72, "niah_multiquery": 72,
                 "ruler_vt": 30, "ruler_cwe": 64, "ruler_fwe": 40}
"""Tokens in which RULER's tasks can be answered; lm-eval allows up to 128, which changes no correct answer."""


@dataclass(frozen=True)
class Question:
    """One prompt: text, or token ids where it was cut from a text's tokens. length: the task's nominal length (0 where
    it has none) [tokens]; targets: strings the metric looks for; metric: `string_match_all` or `string_match_part`
    (RULER's own), `first_number`, `continuation` (the prompt's last `max_new_tokens` tokens are scored, nothing is
    generated), or `lm-eval`, which scores by `doc`; depth: where a needle lies, 0 (start) to 1."""

    task: str
    length: int
    index: int
    prompt: str | list[int]
    targets: list[str]
    metric: str
    max_new_tokens: int
    until: list[str]
    doc: dict[str, Any] | None = None
    depth: float | None = None

    @property
    def case(self) -> str:
        return f"{self.task}@{self.length}" if self.length else self.task

    @property
    def answer_tokens(self) -> int:
        """Tokens that are generated at most."""
        return min(self.max_new_tokens, TOKENS_NEEDED.get(self.task, self.max_new_tokens))

    def tokens(self, tokenizer: Any) -> list[int]:
        """The prompt's token ids."""
        return self.prompt if isinstance(self.prompt, list) else tokenizer(self.prompt)["input_ids"]


def first_of_each(
    requests: Iterable[Question], samples: int | None = None, lengths: Collection[int] = (),
    tasks: Collection[str] = (),
) -> list[Question]:
    """The first `samples` of every task and length, of those lengths and tasks alone that are named."""
    counts: dict[str, int] = {}
    chosen = []
    for r in requests:
        counts[r.case] = counts.get(r.case, 0) + 1
        if ((samples is None or counts[r.case] <= samples) and (not lengths or r.length in lengths)
                and (not tasks or r.task in tasks)):
            chosen.append(r)
    return chosen


def score(request: Question, answer: str) -> float:
    """From 0 to 1. RULER's metrics: the share of the targets that the answer contains, case ignored; `part`: any one.
    `first_number`: whether the answer's first run of digits is the target.

    Raises SparseKVError for a metric that only lm-eval has.
    """
    if request.metric == "first_number":
        digits = re.search(r"\d+", answer)
        return float(digits is not None and digits.group() == request.targets[0])
    if request.metric not in ("string_match_all", "string_match_part"):
        raise SparseKVError(f"answers to {request.task} are scored by lm-eval, which is not installed here: run "
                            "`pip install 'sparsekv[eval]'` and the same command with --resume")
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).lower()
    hits = [target.lower() in text for target in request.targets]
    return float(any(hits)) if request.metric == "string_match_part" else sum(hits) / max(len(hits), 1)


def save_requests(path: str | Path, requests: Sequence[Question], origin: dict[str, Any]) -> Path:
    """Write the file; `origin` says how the requests were made (tasks, lengths, tokenizer, seed, versions)."""
    path = Path(path)
    lines = [json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **origin}),
             *(json.dumps(asdict(request)) for request in requests)]
    data = ("\n".join(lines) + "\n").encode()
    with placed(path) as temporary:
        temporary.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def load_requests(path: str | Path) -> list[Question]:
    """Raises SparseKVError for a missing file, one of another format, or of a newer version."""
    path = Path(path)
    if not path.is_file():
        raise SparseKVError(f"no requests at {str(path)!r}; make them with `sparsekv eval --save-requests {path}`")
    names = {f.name for f in fields(Question)}
    try:
        with _open(path) as file:
            header = json.loads(file.readline())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise SparseKVError(f"{str(path)!r} is no file of requests; expected one of --save-requests")
            if header["format_version"] > FORMAT_VERSION:
                raise SparseKVError(f"{str(path)!r} has format {header['format_version']}; this version reads up to "
                                    f"{FORMAT_VERSION}. Upgrade sparsekv.")
            found = [Question(**{k: v for k, v in json.loads(line).items() if k in names}) for line in file]
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SparseKVError(f"{str(path)!r} is damaged ({first_line(error)}); make the requests again") from error
    if not found:
        raise SparseKVError(f"{str(path)!r} holds no requests")
    return found


def task_names(text: str) -> list[str]:
    """`ruler`, `ruler-offline`, `babilong`, `infinitebench` and single names, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


def check_names(tasks: Sequence[str]) -> None:
    """Raises SparseKVError for tasks lm-eval does not have, and where there is no lm-eval."""
    manager = _task_manager(".", [4096], tasks)
    unknown = [t for t in tasks if t not in SUITES["ruler"] and t not in manager.all_tasks]
    if unknown:
        raise SparseKVError(f"unknown tasks {', '.join(unknown)}: expected {', '.join(OWN_TASKS)}, {', '.join(SUITES)} "
                            f"or generation tasks of lm-eval such as {RULER_OFFLINE[0]} "
                            "(`lm_eval ls tasks` lists all)")


def make_requests(
    tasks: Sequence[str], tokenizer: str | Path, lengths: Sequence[int], samples: int, *, seed: int = 0,
    skip_missing: bool = False, data: Path | None = None, advance: Callable[..., None] = lambda: None,
) -> list[Question]:
    """The first `samples` documents of every task (and length, for RULER and BABILong) as lm-eval makes them.

    tokenizer: a folder with a tokenizer, which sizes RULER's prompts. skip_missing: leave out tasks whose data cannot
    be fetched. data: a folder with the files of RULER's own `data/synthetic/json` (`RULER_DATA`), from which its tasks
    are made without a network. Raises SparseKVError without lm-eval, for unknown tasks and for data that cannot be
    fetched.
    """
    absent = [n for n in RULER_DATA.values() if data is not None and not (data / n).is_file()]
    if absent:
        raise SparseKVError(f"{str(data)!r} has no {', '.join(absent)}; expected the files of RULER's "
                            "scripts/data/synthetic/json")
    check_names(tasks)
    manager = _task_manager(tokenizer, lengths, tasks)
    ruler, sized = (bool(set(tasks) & set(names)) for names in (SUITES["ruler"], BABILONG))
    if sized and not set(lengths) <= set(BABILONG_SIZES):
        raise SparseKVError(f"BABILong comes in lengths {', '.join(map(str, BABILONG_SIZES))}; found "
                            f"{', '.join(map(str, lengths))}")
    if ruler and any(length < 1024 for length in lengths):
        raise SparseKVError(f"RULER's prompts do not fit into {min(lengths)} tokens (lm-eval would search for ever); "
                            "use lengths from 1024 on")
    requests: list[Question] = []
    missing: set[str] = set()
    for name in tasks:
        source = _data_of(name, manager)
        try:
            if source in missing:
                continue  # asked for once: what is not there takes half a minute to be refused
            if name in BABILONG:
                for length in lengths:
                    own = _task_manager(tokenizer, BABILONG_SIZES[length], [name])
                    made = _requests_of(name, own, samples, seed)
                    requests += [replace(r, length=length, metric="string_match_all", doc=None,
                                         targets=[r.doc["target"].strip()]) for r in made if r.doc is not None]
            else:
                requests += _requests_of(name, manager, samples, seed, data)
        except _fetch_errors() as error:
            if not skip_missing:
                raise SparseKVError(
                    f"the data of task {name} ({source}) cannot be fetched here: {first_line(error)}; make the "
                    "requests on a machine with a network (--save-requests), or add --skip-missing to leave such "
                    "tasks out"
                    ) from error
            missing.add(source)
        except ImportError as error:
            if not skip_missing:
                raise SparseKVError(f"task {name} needs packages that are not installed: {first_line(error)}; or add "
                                    "--skip-missing to leave such tasks out") from error
        finally:
            advance()
    if not requests:
        raise SparseKVError(f"none of the tasks {', '.join(tasks)} has data that can be fetched here")
    return requests


def _task_manager(tokenizer: str | Path, lengths: Sequence[int] | str, names: Sequence[str]) -> Any:
    """lm-eval's tasks: where the folders named like the tasks have them all, only those (reading every folder takes
    many seconds)."""
    try:
        from lm_eval import tasks
    except ImportError as error:
        raise SparseKVError("unknown tasks without lm-eval, which brings all but needle and perplexity: run "
                            "`pip install 'sparsekv[eval]'`, or answer a file made elsewhere with --requests FILE"
                            ) from error
    metadata = {"tokenizer": str(tokenizer), "max_seq_lengths": lengths if isinstance(lengths, str) else list(lengths)}
    home = Path(tasks.__file__).parent
    folders = {home / ("ruler" if name in SUITES["ruler"] else name.split("_")[0]) for name in names}
    if all(folder.is_dir() for folder in folders):
        manager = tasks.TaskManager(include_path=sorted(folders), include_defaults=False, metadata=metadata)
        if set(names) <= set(manager.all_tasks):
            return manager
    return _all_tasks(json.dumps(metadata))


@functools.cache
def _all_tasks(metadata: str) -> Any:
    """Every task of lm-eval; takes ten seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(metadata=json.loads(metadata))


def _data_of(name: str, manager: Any) -> str:
    """The data set a task, or the first task of a group, comes from."""
    if name in DATA:
        return DATA[name]
    entry = manager.task_index.get(name)
    config = (entry.cfg if entry is not None else None) or {}
    if config.get("dataset_path") or entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return str(config.get("dataset_path") or name)
    members = config.get("task")
    if not isinstance(members, list):
        members = [other.name for other in manager.task_index.values() if name in other.tags]
    return next((_data_of(m, manager) for m in members if isinstance(m, str) and m != name), name)


def _requests_of(name: str, manager: Any, samples: int, seed: int, data: Path | None = None) -> list[Question]:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the tasks draw from the global generator)
    with _quiet():
        tasks = manager.load([_fewer(name, manager, samples, data)])["tasks"].values()
    found: list[Question] = []
    for task in tasks:
        if task.OUTPUT_TYPE != "generate_until":
            raise SparseKVError(f"task {task.config.task} is {task.OUTPUT_TYPE}, not generation; run it with `lm_eval "
                                "--model sparsekv`")
        taken, counts = [], dict[int, int]()
        for index, doc in enumerate(task.eval_docs):
            length = int(doc.get("max_length") or 0)
            counts[length] = counts.get(length, 0) + 1
            if counts[length] <= samples:
                taken.append(index)
        with _quiet():
            task.build_all_requests(samples=taken, rank=0, world_size=1)
        found += [_request(instance, name in SUITES["ruler"]) for instance in task.instances]
    return found


def _fewer(name: str, manager: Any, samples: int, data: Path | None) -> Any:
    """The task as lm-eval knows it; RULER's, which make 500 prompts of every length and fetch what they are made of
    (lm-eval 0.4.13 has no option for either), with `samples` of each and of what is in the folder `data`, if given."""
    entry = manager.task_index.get(name) if name in SUITES["ruler"] else None
    path, _, function = str((entry.cfg or {}).get("custom_dataset", "") if entry is not None else "").rpartition(".")
    if not path:
        return name
    home = "lm_eval.tasks.ruler."

    def made(**options: Any) -> Any:
        own = vars(importlib.import_module(home + Path(path).name))
        modules = [own, *(vars(m) for name, m in list(sys.modules.items()) if name.startswith(home))]
        other: dict[str, Any] = {"tqdm": lambda every, **_: itertools.islice(every, samples)}  # loops over prompts
        other |= _read_from(data, modules) if data is not None else {}
        shown = [(module, key, module[key]) for module in modules for key in other if key in module]
        try:
            for module, key, _ in shown:
                module[key] = other[key]
            return own[function](**options)
        finally:
            for module, key, before in shown:
                module[key] = before

    return {"group": "fewer", "task": [{"task": name, "custom_dataset": made}]}


def _read_from(data: Path, modules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What lm-eval's RULER reads its texts with, by name, reading files of a folder. Sentences of the essays end where
    NLTK's tokenizer of English finds them, or, where its model is not installed, its untrained one."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    haystack = next((m["get_haystack"] for m in modules if "get_haystack" in m), None)

    def get_haystack(type_haystack: str) -> Any:
        if type_haystack != "essay":
            assert haystack is not None
            return haystack(type_haystack=type_haystack)
        return json.loads((data / RULER_DATA["essay"]).read_text(encoding="utf-8"))["text"].split()

    def download_json(url: str) -> Any:
        return json.loads((data / RULER_DATA["hotpot" if "hotpot" in url else "squad"]).read_text(encoding="utf-8"))

    found: dict[str, Any] = {"get_haystack": get_haystack, "download_json": download_json}
    try:
        import nltk

        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        found["cached_sent_tokenize"] = functools.cache(PunktSentenceTokenizer().tokenize)
    return found


def _request(instance: Any, ruler: bool) -> Question:
    """lm-eval's own prompt and options as a plain record."""
    doc, (prompt, options) = instance.doc, instance.args
    until = options.get("until") or []
    metric, targets = "lm-eval", []
    if ruler:
        metric = "string_match_part" if instance.task_name.startswith("ruler_qa") else "string_match_all"
        targets = [str(x) for x in doc["outputs"]]
    return Question(task=instance.task_name, length=int(doc.get("max_length") or 0), index=int(instance.doc_id),
                   prompt=prompt, targets=targets, metric=metric, max_new_tokens=int(options.get("max_gen_toks", 256)),
                   until=[until] if isinstance(until, str) else list(until), doc=None if ruler else dict(doc))


def score_answers(requests: Sequence[Question], answers: Sequence[str]) -> list[float]:
    """Scores by lm-eval's own `process_results`: the task's first metric. The documents are those of the requests, so
    that nothing is downloaded. Raises SparseKVError without lm-eval or without a package that the metric needs."""
    import datasets

    def kept(documents: datasets.Dataset) -> Callable[..., Any]:
        return lambda **_: defaultdict(lambda: documents)  # whatever a task calls its splits

    names = sorted({r.task for r in requests})
    manager = _task_manager(".", [4096], names)
    specs = [{"task": name, "custom_dataset": kept(datasets.Dataset.from_list(
        [r.doc for r in requests if r.task == name][:1]))} for name in names]
    try:
        with _quiet():
            tasks = manager.load([{"group": "answered", "task": specs}])["tasks"]
    except ImportError as error:
        raise SparseKVError(f"{', '.join(names)} needs packages that are not installed to score its answers: "
                            f"{first_line(error)}; the same command with --resume scores them then") from error
    scores = []
    for request, answer in zip(requests, answers, strict=True):
        result = tasks[request.task].process_results(request.doc, [answer])
        value = next(iter(result.values()))
        scores.append(float(value if isinstance(value, int | float) else value[0]))
    return scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what lm-eval and the hub's client print and log: what matters is raised."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _fetch_errors() -> tuple[type[BaseException], ...]:
    """What lm-eval and datasets raise when data cannot be had."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from requests.exceptions import RequestException

    return OSError, LookupError, DatasetsError, HfHubHTTPError, RequestException


def head_of(path: Path) -> str:
    """The head of a file of requests or cells, or what stands there."""
    with _open(path) as file:
        return file.readline(100_000)


def _open(path: Path) -> IO[Any]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
