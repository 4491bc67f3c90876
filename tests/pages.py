"""Parses what Markdown pages show: outputs of commands, and figures in sentences and tables."""

import collections
import difflib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))


# --- Outputs --------------------------------------------------------------------------------------

BLOCK_OR_COMMAND = re.compile(
    r"^ *```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$|`(?P<inline>python -m [^`]+)`",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r" *(\w+=\S+ )*(#|\.|cd|git|make|perl|pip|python|sed) ")


class Output(NamedTuple):
    """A fenced block without a language, which is not itself a block of commands."""

    commands: list[str]  # the last ones before it, a fenced block or one in a sentence
    edit: str  # the ```python block between these commands and the output, if any
    text: str
    start: int  # index of the text in the page


def outputs(page: str) -> Iterator[Output]:
    """The outputs that the page shows, in order."""
    commands, edit = list[str](), ""
    for match in BLOCK_OR_COMMAND.finditer(page):
        language, text, inline = match["language"], match["text"], match["inline"]
        lines = (text or "").replace("\\\n", " ").splitlines()
        if inline:
            if "--config-name" in inline:
                commands, edit = [" ".join(inline.split())], ""
        elif language == "python":
            edit = text
        elif not language and all(map(COMMAND.match, lines)):
            commands, edit = [" ".join(line.split()) for line in lines], ""
        elif not language:
            yield Output(commands, edit, text, match.start("text"))


def key(line: str) -> str:
    """Returns the line without the widths of its columns, and without the numbers of source lines
    that precede a function's name, as in `train.py:316 block`. Pages have ### for the number."""
    line = re.sub(r"(\.py):[\d#]+(?=,?( in)? [a-z_][\w.]*([,:]|  |$))", r"\1", line.strip())
    return " ".join(line.split())


def is_shown(line: str) -> bool:
    """False for blank lines, and for "...", which stands for lines left out."""
    return line.strip() not in ("", "...")


def missing(text: str, printed: list[str]) -> list[str]:
    """Lines of the text that aren't among the printed ones, or not in this order."""
    keys, first, lines = [key(line) for line in printed], 0, []
    for line in filter(is_shown, text.splitlines()):
        try:
            first = keys.index(key(line), first) + 1
        except ValueError:
            lines.append(line)
    return lines


def current(line: str, printed: list[str], first: int = 0) -> int | None:
    """Returns the index of the most similar printed line, if one is similar. Of lines that differ
    only in numbers of source lines, it is the one with the same number, or else the first."""

    def split(text: str) -> tuple[str, list[str]]:
        return re.sub(r"\.py:[\d#]+", ".py", key(text)), re.findall(r"\.py:\d+", text)

    def likeness(index: int) -> tuple[float, bool, int]:
        text, numbers = split(printed[index])
        ratio = difflib.SequenceMatcher(None, split(line)[0], text).ratio()
        return ratio, split(line)[1] == numbers, -index

    best = max(map(likeness, range(first, len(printed))), default=(0, False, 0))
    return -best[2] if best[0] > 0.6 else None


def updated(text: str, printed: list[str]) -> str:
    """The text with each line replaced by its `current` one, if it has one."""
    first, lines, group = 0, list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        if not is_shown(line):
            lines += [*narrowed(group), line]
            group = []
        else:
            indent = line[: len(line) - len(line.lstrip())]
            index = current(line, printed, first)
            now = line if index is None else indent + printed[index]
            group.append(re.sub(r"\.py:\d+ ", ".py:### ", now))
            first = first if index is None else index + 1
    return "".join(f"{line}\n" for line in lines[:-1])


def narrowed(rows: list[str]) -> list[str]:
    """Closes gaps between the columns of a printed table from which rows were left out."""
    indent = min((len(row) - len(row.lstrip()) for row in rows), default=0)
    width = max(map(len, rows), default=0)
    blank = [all(row[i : i + 1].strip() == "" for row in rows) for i in range(width)]
    kept = [i for i in range(width) if i < max(indent, 2) or not all(blank[i - 2 : i + 1])]
    return ["".join(row[i : i + 1] for i in kept) for row in rows]


# --- Figures --------------------------------------------------------------------------------------

NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"({NUMBER})(?= ?[%kMGTP]| (?:B|FLOP|m?s|nats|seconds|minutes|hours)\b) ?"
    r"(%|[kMGTP]?(?:B|FLOP)\b|m?s\b|nats|seconds|minutes|hours)"
)
BARE = re.compile(rf"({NUMBER})(?![\w.])()")
SPELLED = re.compile(r"\b\w+(?: to \w+)? (?:minutes|hours)\b")


def value(number: str) -> float:
    return float(number.replace(",", ""))


def rounds_to(exact: float, number: str) -> bool:
    """True if the number, as written, is the exact one rounded to its digits after the point."""
    decimals = len(number.partition(".")[2])
    return abs(exact - value(number)) <= 0.5000001 * 10**-decimals


def unknown(text: str, source: str, kind: re.Pattern[str] = FIGURE) -> list[str]:
    """Figures of the text to which no figure of the source rounds: with units, or BARE numbers."""
    known = collections.defaultdict[str, list[float]](list)
    for number, unit in kind.findall(source):
        known[unit].append(value(number))
    return [
        f"{number} {unit}".strip()
        for number, unit in kind.findall(text)
        if not any(rounds_to(exact, number) for exact in known[unit])
    ]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section(page: str, anchor: str) -> str:
    """The prose from a heading to the next one of its level or above."""
    text = prose(page)
    for heading in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE):
        if slug(heading[2]) == anchor:
            above = re.compile(rf"^#{{1,{len(heading[1])}}} ", re.MULTILINE)
            return heading[0] + above.split(text[heading.end() :])[0]
    raise AssertionError(f"no section #{anchor}")
