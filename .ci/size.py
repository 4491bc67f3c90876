"""Counts lines of Python per file and folder, without blank lines, comments and docstrings, and the
lines that patch files add."""

import ast
import io
import pathlib
import subprocess
import tokenize

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(path: pathlib.Path) -> int:
    source = path.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.string:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def added_lines(path: pathlib.Path) -> int:
    lines = path.read_text().splitlines()
    return sum(line.startswith("+") and not line.startswith("+++") for line in lines)


def listed(counts: dict[pathlib.Path, int]) -> None:
    folders = sorted({file.parts[0] for file, count in counts.items() if count})
    for name in folders:
        inside = {file: count for file, count in counts.items() if file.parts[0] == name and count}
        print(f"{sum(inside.values()):6} {name}")
        if [*inside] != [pathlib.Path(name)]:
            for file, count in inside.items():
                print(f"{count:12} {file}")


command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
files = [file for name in sorted(names) if (file := pathlib.Path(name)).exists()]
listed({file: code_lines(file) for file in files if file.suffix == ".py"})
print("added by patches:")
listed({file: added_lines(file) for file in files if file.suffix in (".patch", ".diff")})
