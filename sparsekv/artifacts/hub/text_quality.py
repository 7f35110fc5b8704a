"""What a training loses and wins on a text, `quality.json`: the distance of its next tokens to full attention's,
perplexity, and bytes read, by budget, and the budget that follows. `evaluation/text_quality.py` measures it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.artifacts.checks import check_version, damaged, from_record, parse_object
from sparsekv.artifacts.format import read_config
from sparsekv.artifacts.hub.named import KINDS
from sparsekv.artifacts.hub.named import QUALITY as FILE
from sparsekv.core.registry import ESTIMATOR_ROWS, GREY, NONE, SELECTOR_ROWS
from sparsekv.util.errors import SparseKVError
from sparsekv.util.pages import Drawing, canvas, drawn, legend, markdown
from sparsekv.util.records import write_json

FIGURE = "quality.png"
FORMAT_VERSION = 1
COLUMNS = ("what is read", "token_budget", "KL [nats a token]", "same next token", "perplexity", "bytes read",
           "ms a token")
GOAL = 0.005
"""How much above full attention's the perplexity may be at a budget that is recommended, a share of it."""
CAPTION = ("Perplexity above full attention's (with 95 % intervals; dotted: the goal) and next tokens that are full "
           "attention's, by budget")


@dataclass(frozen=True)
class Setting:
    """One way to decode, and what it costs. loss: perplexity over full attention's, less 1; margin: half of its 95 %
    interval; same_tokens: share of next tokens that are full attention's, the text before each given; bytes_read: all
    that a step of a sparse layer reads over the bytes of its keys and values; kl: mean KL(full || method) of the next
    token [nats a token]; ms_per_token: time of a decode step after a window, of a batch of one [ms]; both None in cards
    of earlier versions."""

    selector: str
    completion: str
    token_budget: float
    loss: float
    margin: float
    same_tokens: float
    bytes_read: float
    kl: float | None = None
    ms_per_token: float | None = None

    @property
    def name(self) -> str:
        """Name the setting as tables do: `sketch + φ`."""
        row = ESTIMATOR_ROWS.get(self.completion)
        completion = row.symbol if row is not None else self.completion
        return self.selector if self.completion == NONE else f"{self.selector} + {completion}"

    @property
    def arguments(self) -> str:
        """The arguments of `attach` beside the artifacts; by default it completes."""
        return f"token_budget={self.token_budget:g}" + (', completion="none"' if self.completion == NONE else "")


@dataclass(frozen=True)
class TextQuality:
    """tokens: at the end of every window, scored given all before; unseen: whether neither training nor calibration
    has seen the windows' text; perplexity and ms_per_token: full attention's; artifacts: their checksums, by kind;
    origin: machine, commit, hash and type of the weights."""

    corpus: str
    unseen: bool
    context_length: int
    windows: int
    tokens: int
    perplexity: float
    artifacts: dict[str, Any]
    settings: list[Setting]
    origin: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    ms_per_token: float | None = None

    @property
    def good(self) -> list[Setting]:
        """Those that keep the goal, and keep it at every larger budget that was measured: few tokens are scored, and
        one budget may keep it by chance."""
        return [s for s in self.settings if all(
            x.loss <= GOAL for x in self.settings if x.name == s.name and x.token_budget >= s.token_budget)]

    @property
    def recommended(self) -> Setting:
        """Return the setting that writes the most tokens as full attention does, of the smallest budget at which a
        setting is good, or of the largest where none is: of as few tokens perplexity alone tells less."""
        budget = min((s.token_budget for s in self.good), default=max(s.token_budget for s in self.settings))
        return max((s for s in self.settings if s.token_budget == budget),
                   key=lambda s: (s.same_tokens, s in self.good, -s.loss, s.completion != NONE))

    def save(self, folder: Path) -> None:
        best = self.recommended
        recommended = {"token_budget": best.token_budget, "completion": best.completion, "reached": bool(self.good),
                       "goal": GOAL}
        write_json(folder / FILE, {**asdict(self), "recommended": recommended})

    def text(self) -> str:
        """Write sentence, table and recommendation, for a terminal."""
        return f"{self.about()}\n\n{self.table()}\n\n{self.advice()}"

    def about(self) -> str:
        """Say on what it was measured, and what the columns mean."""
        seen = "" if self.unseen else (" The corpus holds no text that training has not seen: the maps were calibrated "
                                       "on these windows.")
        return (f"The last {self.tokens} tokens of {self.windows} held-out window{'s' * (self.windows != 1)} of "
                f"{self.context_length} tokens, each token given all before it; full attention has a perplexity of "
                f"{self.perplexity:.2f}. KL is the mean distance of the next token's distribution to full "
                f"attention's; perplexity is relative to full attention's, ± half the 95 % interval; next tokens are "
                f"those that full attention would write, too; bytes are what a step of a sparse layer reads of its "
                f"keys and values, index and completion included.{seen}")

    def table(self) -> str:
        """Write a line a setting, in Markdown."""
        return markdown(COLUMNS, self.lines())

    def lines(self) -> list[list[str]]:
        """Under `COLUMNS` a line a setting."""
        return [[s.name, f"{s.token_budget:g}", "–" if s.kl is None else f"{s.kl:.2g}", f"{100 * s.same_tokens:.1f} %",
                 f"{_signed(s.loss)} ± {100 * s.margin:.1f} %", f"{100 * s.bytes_read:.1f} %", _ms(s.ms_per_token)]
                for s in self.settings]

    def verdict(self) -> dict[str, str]:
        """Gain, loss and setting of what is recommended, each a sentence, by name."""
        best, mine, full = self.recommended, self.recommended.ms_per_token, self.ms_per_token
        gain = f"A step of a sparse layer reads {100 * best.bytes_read:.1f} % of the bytes of its keys and values."
        if mine is not None and full is not None:
            gain += (f" After {self.context_length} tokens a token takes {_ms(mine)} ms, with full attention "
                     f"{_ms(full)} ms ({self.origin.get('machine', 'this machine')})")
            gain += "." if mine < full else "; a cache this short is decoded with full attention by default."
        loss = (f"Perplexity {_signed(best.loss)} ± {100 * best.margin:.1f} %; {100 * best.same_tokens:.1f} % of the "
                "next tokens are full attention's")
        return {"Gain": gain, "Loss": f"{loss}." if best.kl is None else f"{loss}; KL {best.kl:.2g} nats a token.",
                "Setting": f"{best.arguments} ({best.name})" + (
                    "." if self.good else f"; no budget measured stays within {100 * GOAL:g} % of the perplexity.")}

    def advice(self) -> str:
        """`recommended: token_budget=…`, and why."""
        best, goal = self.recommended, f"{100 * GOAL:g} % of full attention's perplexity"
        if self.good:
            why = f"the smallest budget measured from which on a setting's perplexity stays within {goal}"
        else:
            why = f"the largest budget measured; none stays within {goal}, this one has {_signed(best.loss)} %"
        if len({s.completion for s in self.settings}) > 1:
            why += ". No setting at this budget has more next tokens of full attention's"
        if best.margin > GOAL:
            why += (f". The interval, ± {100 * best.margin:.1f} %, is wider than that: `sparsekv eval --tasks "
                    "perplexity` measures more text")
        return f"recommended: {best.arguments} ({best.name}): {why}"

    def figure(self) -> Drawing:
        """Perplexity and next tokens over the budgets."""
        figure, (left, right) = canvas(2, height=3.1)
        budgets = sorted({s.token_budget for s in self.settings})
        for number, name in enumerate(dict.fromkeys(s.name for s in self.settings)):
            line = sorted((s for s in self.settings if s.name == name), key=lambda s: s.token_budget)
            row = SELECTOR_ROWS.get(line[0].selector)
            look: dict[str, Any] = {"color": GREY if row is None else row.colour, "marker": "o", "markersize": 4,
                                    "linestyle": "--" if line[0].completion == NONE else "-", "label": name}
            at = [budgets.index(s.token_budget) + 0.04 * number for s in line]  # no interval hides another
            left.errorbar(at, [100 * s.loss for s in line], [100 * s.margin for s in line], elinewidth=1, **look)
            right.plot(at, [100 * s.same_tokens for s in line], **look)
        left.axhline(100 * GOAL, color=GREY, linestyle=":", linewidth=1.2)
        left.axhline(0, color=GREY, linewidth=0.8)
        left.set_ylabel("perplexity above full attention's [%]", fontsize=9)
        right.set_ylabel("same next token [%]", fontsize=9)
        for axes in (left, right):
            axes.set_xticks(range(len(budgets)), [f"{100 * b:g} %" for b in budgets])
            axes.set_xlabel("token_budget")
        legend(left)
        return drawn(figure)


def _ms(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds:.3g}"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def parse_quality(text: bytes, where: str) -> TextQuality:
    """From the text of a `quality.json`. Raises SparseKVError for what is none."""
    record = parse_object(text, where)
    check_version(record.get("format_version"), FORMAT_VERSION, where)
    given = record.get("settings")
    if not isinstance(given, list) or not given or not all(isinstance(s, dict) for s in given):
        raise damaged(where, "it has no settings")
    made: TextQuality = from_record(
        TextQuality, {**record, "settings": [from_record(Setting, s, where) for s in given]}, where)
    return made


def checksums(configs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the checksums that the config.json of artifacts say."""
    return {kind: str(config.get("sha256")) for kind, config in configs.items()}


def read_quality(folder: Path) -> TextQuality | None:
    """The card in the folder of a training; None where there is none of the artifacts that lie there now. Raises
    SparseKVError for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = parse_quality(path.read_bytes(), repr(str(path)))
    except OSError as error:
        raise SparseKVError(f"could not read {str(path)!r}: {error.strerror or error}") from error
    there = checksums({kind: read_config(folder / kind) for kind in KINDS})
    if found.artifacts == there:
        return found
    print(f"{str(path)!r} was measured with other artifacts than lie there now: it is left out", file=sys.stderr)
    return None
