"""Run by test_restart.py in a process of its own, which is killed or joined with others: one tiny capture.

Arguments: output, number of documents, devices."""

import sys

import torch
from test_families import FAMILIES, SIZES, Words
from transformers import AutoModelForCausalLM

from sparsekv.capture.run import CaptureConfig, run_capture


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, extra = FAMILIES["llama"]
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **extra})).eval()
    print("ready", flush=True)
    run_capture(CaptureConfig(
        model="tiny", corpus="embedded", output=sys.argv[1], context_length=400, num_documents=int(sys.argv[2]),
        queries_per_document=40, chunk_size=150, device="cpu", devices=int(sys.argv[3])),
        model=model, tokenizer=Words())


if __name__ == "__main__":
    main()
