"""Run by test_running.py in a process of its own, which is killed or joined with others.

Arguments: router, phi or both, capture store, output (of both: their folder), `name=value` options."""

import sys

import torch

from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RouterConfig, RouterRecipe, train_router

OPTIONS = {
    "router": {"scores": "mlp", "num_buckets": 12},
    "phi": {"batch_size": 8, "keys_per_step": 32, "width": 16},
}
RECIPES = {"router": (RouterRecipe(hidden_size=24, batch_size=16),), "phi": ()}
COMMON = {"max_steps": 60, "device": "cpu"}


def train(kind: str, capture: str, output: str, **options: object):
    config, work = {"router": (RouterConfig, train_router), "phi": (PhiConfig, train_phi)}[kind]
    return work(config(**{"capture": capture, "output": output, **COMMON, **OPTIONS[kind], **options}), *RECIPES[kind])


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, capture, output = sys.argv[1:4]
    options = {name: int(value) for name, value in (word.split("=") for word in sys.argv[4:])}
    for one in OPTIONS if kind == "both" else (kind,):
        train(one, capture, f"{output}/{one}" if kind == "both" else output, **options)
