"""The drawings of the docs: SVG in the colours of the page, docs/assets/NAME.svg. `python benchmarks/tables.py` draws
them."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

GREEN, ORANGE, BLUE, PINK, GREY, YELLOW = "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#7f7f7f", "#E69F00"
"""Okabe and Ito's palette: anchors, what is chosen, codes, φ, what is not read, what was generated."""
FAINT = ' opacity=".72"'


class Sheet:
    """An SVG under construction; text and lines take the page's colour."""

    def __init__(self, name: str, title: str, width: int, height: int):
        self.name = name
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="{name}-t" class="way">', f'<title id="{name}-t">{escape(title)}</title>',
            f'<defs><marker id="{name}-a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>',
            '<g fill="none" stroke="currentColor" stroke-width="1.3" font-family="inherit" font-size="13">']

    def text(self, x: float, y: float, words: str, *, size: int = 12, bold: bool = False, at: str = "middle") -> None:
        weight = ' font-weight="600"' if bold else FAINT
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" stroke="none" fill="currentColor" '
                          f'font-size="{size}"{weight}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, colour: str = "") -> None:
        """A box, its first line bold."""
        paint = f' fill="{colour}" fill-opacity=".16" stroke="{colour}"' if colour else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"{paint}/>')
        top = y + height / 2 - 9 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * i, line, size=12 if i else 13, bold=not i)

    def cells(self, x: float, y: float, kinds: str, *, step: float = 18, size: tuple[float, float] = (16, 26)) -> None:
        """Tokens in a row, a letter each: s sink, m mid, r a mid token that is read, w window, g generated, space none;
        f a mid token in φ's summary."""
        paint = {"s": (GREEN, .6), "m": (GREY, .10), "r": (ORANGE, .75), "w": (BLUE, .6), "g": (YELLOW, .6),
                 "f": (PINK, .30), "c": (BLUE, .35)}
        for i, kind in enumerate(kinds):
            if kind != " ":
                colour, depth = paint[kind]
                self.parts.append(
                    f'<rect x="{x + step * i:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" rx="2" '
                    f'fill="{colour}" fill-opacity="{depth}" stroke="{colour}"/>')

    def brace(self, x: float, end: float, y: float, words: str, below: bool = False) -> None:
        """A bracket over (or under) a part of a row, and its name."""
        up = -6 if below else 6
        self.parts.append(f'<path d="M{x:g} {y + up:g}V{y:g}H{end:g}V{y + up:g}" opacity=".6"/>')
        self.text((x + end) / 2, y + (15 if below else -7), words)

    def arrow(self, path: str, dashed: bool = False) -> None:
        more = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" marker-end="url(#{self.name}-a)"{more}/>')

    def drawn(self) -> str:
        return "\n".join([*self.parts, "</g>", "</svg>"]) + "\n"


def step() -> str:
    """A decode step: what is read exactly, what φ stands for, one normalisation."""
    s = Sheet("step", "A decode step: sink, tail and a few tokens of the mid region are read exactly; a summary by "
              "feature maps stands for the rest; both parts share one normalisation", 920, 360)
    s.box(20, 22, 150, 50, "query q", "of the new token")
    x = 200
    s.cells(x, 62, "ssss mmmrmmmmmmrrmmmmmmrmmmmmm wwwwgggg")
    s.brace(x, x + 70, 52, "sink")
    s.brace(x + 90, x + 538, 52, "mid region: the long middle of the context")
    s.brace(x + 558, x + 700, 52, "tail")
    s.text(x + 35, 108, "read")
    s.text(x + 629, 108, "read")
    s.text(x + 314, 108, "orange: the few tokens that the selector chose, read")
    s.arrow("M95 72V178")
    s.arrow("M235 116C235 150 320 150 330 176")
    s.arrow("M514 116V136C514 150 420 150 400 176")
    s.arrow("M829 116C829 150 480 140 450 176")
    s.box(20, 180, 170, 62, "φ(q)", "features of the query", colour=PINK)
    s.box(270, 180, 260, 62, "exact attention", "over what is read", colour=ORANGE)
    s.box(620, 180, 280, 62, "summary of the mid region", "fixed size, made once from φ(k) and v", colour=PINK)
    s.arrow("M105 242C105 300 760 300 760 246", dashed=True)
    s.text(630, 308, "asks for all but what was read")
    s.arrow("M620 211H534")
    s.text(577, 203, "the rest")
    s.arrow("M400 242V326")
    s.text(400, 346, "one normalisation over both parts: the output of the head", size=13, bold=True)
    return s.drawn()


def line() -> str:
    """From a text to a model that decodes sparsely."""
    s = Sheet("line", "Text is captured, the capture is trained on, artifacts are attached to the model or served",
              920, 210)
    s.box(14, 52, 110, 64, "text", "any corpus")
    s.box(184, 52, 170, 64, "capture store", "keys, values, queries", colour=GREY)
    s.box(414, 26, 170, 52, "router and sketch", "k-means, closed form", colour=BLUE)
    s.box(414, 92, 170, 52, "feature maps φ", "gradient steps", colour=PINK)
    s.box(664, 26, 240, 52, "attach(model, …)", "your program, transformers", colour=ORANGE)
    s.box(664, 92, 240, 52, "vLLM backend", "a server", colour=ORANGE)
    s.arrow("M124 84H180")
    s.text(152, 42, "sparsekv capture")
    s.arrow("M354 84C384 84 384 52 410 52")
    s.arrow("M354 84C384 84 384 118 410 118")
    s.text(384, 166, "sparsekv train-router, train-phi")
    s.arrow("M584 52H660")
    s.arrow("M584 118H660")
    s.arrow("M584 118C624 118 622 58 660 56")
    s.arrow("M584 52C624 52 622 112 660 114")
    s.text(622, 42, "artifacts")
    s.parts.append('<path d="M14 184H584" opacity=".6"/>')
    s.text(299, 202, "once, offline: `sparsekv train` does all of it".replace("`", ""))
    s.parts.append('<path d="M620 184H904" opacity=".6"/>')
    s.text(762, 202, "every request; the model's weights never change")
    return s.drawn()


def sketch() -> str:
    """Codes of keys, and how a query finds the best tokens by them."""
    s = Sheet("sketch", "A key becomes a code of 32 bytes; a query scores codes of candidates and the best tokens are "
              "read", 920, 330)
    s.text(14, 22, "once a key", size=13, bold=True, at="start")
    s.box(14, 36, 160, 58, "key k", "128 numbers, 256 bytes")
    s.arrow("M174 65H236")
    s.box(240, 36, 250, 58, "trained directions", "those in which scores differ most", colour=BLUE)
    s.arrow("M490 65H552")
    s.box(556, 36, 250, 58, "code", "60 small integers, 32 bytes", colour=BLUE)
    s.text(14, 136, "every step", size=13, bold=True, at="start")
    s.box(14, 150, 160, 58, "query q", "of a group of heads")
    s.arrow("M174 179H236")
    s.box(240, 150, 250, 58, "the best buckets", "a tenth of the context", colour=GREEN)
    s.arrow("M490 179H552")
    s.box(556, 150, 250, 58, "scores of their codes", "integers times integers", colour=BLUE)
    s.arrow("M680 208V240")
    s.cells(240, 250, "crccccrccccccrccccccccrcccccccc")
    s.text(519, 300, "the tokens with the best scores: 1 % of the context, read exactly")
    s.text(120, 268, "candidates")
    return s.drawn()


def completion() -> str:
    """What completion adds, and what it takes out."""
    s = Sheet("completion", "The summary of all mid tokens, less the estimates of those that were read, is added to "
              "the exact part under one normalisation", 920, 290)
    s.text(14, 24, "the summary counts every mid token", size=13, bold=True, at="start")
    s.cells(14, 36, "ffffffffffffffffffffff")
    s.text(440, 54, "Σ φ(k), Σ φ(k)·v: one table a head, made at the end of the prefill", at="start")
    s.text(14, 100, "the step reads a few of them", size=13, bold=True, at="start")
    s.cells(14, 112, "mmmrmmmmmmrrmmmmmmmmrm")
    s.text(440, 130, "exp(q·k), exactly", at="start")
    s.text(14, 176, "their estimates leave the summary", size=13, bold=True, at="start")
    s.cells(14, 188, "fff ffffff  ffffffff f")
    s.text(440, 206, "less φ(q)·φ(k), made anew from each key that is read", at="start")
    s.box(14, 236, 800, 44, "output = (exact numerators + what is left) / (exact weights + what is left)", colour=PINK)
    return s.drawn()


def prefill() -> str:
    """What happens at the end of a prefill."""
    s = Sheet("prefill", "A prompt is read with full attention; then, once, buckets, codes and the summary are made of "
              "its mid region", 920, 250)
    s.text(14, 24, "1. the prompt, read with full attention in chunks", size=13, bold=True, at="start")
    for i in range(4):
        s.cells(14 + 150 * i, 38, "mmmmmmmm")
        s.brace(14 + 150 * i, 14 + 150 * i + 142, 76, f"chunk {i + 1}", below=True)
    s.arrow("M620 51H690")
    s.text(800, 56, "keys and values stay")
    s.text(14, 132, "2. once, before the first new token", size=13, bold=True, at="start")
    s.box(14, 146, 270, 62, "buckets", "trained centroids move to these keys", colour=GREEN)
    s.box(310, 146, 270, 62, "codes", "one a key, 32 bytes", colour=BLUE)
    s.box(606, 146, 290, 62, "summary", "features of all mid keys, summed", colour=PINK)
    s.text(455, 236, "3. then every step reads sink, tail and what is chosen")
    return s.drawn()


DRAWINGS: dict[str, Callable[[], str]] = {
    "decode-step": step, "line": line, "sketch": sketch, "completion": completion, "prefill": prefill}
