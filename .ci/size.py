"""Counts lines of code per file and folder, without blank lines, comments and docstrings."""

import ast
import io
import pathlib
import sys
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


for name in sys.argv[1:]:
    root = pathlib.Path(name)
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    counts = {file: code_lines(file) for file in files}
    print(f"{sum(counts.values()):5} {name}")
    if len(files) > 1:
        for file, count in counts.items():
            print(f"{count:11} {file}")
