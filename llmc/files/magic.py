"""What a file is, by the number that it begins with: its magic number.

The numbers of llm.c's other files stand here. The number of a model's files stands in the model's script.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DEBUG_STATE, TOKENIZER, TOKENS, EVALUATION = 20240327, 20240328, 20240520, 20240522
TOKENS_32, TOKENS_MARKED = 20240801, 20261128

CONTENTS = {
    DEBUG_STATE: "a debug state",
    TOKENIZER: "a tokenizer",
    TOKENS: "GPT-2 tokens",
    EVALUATION: "a multiple-choice evaluation set",
    TOKENS_32: "tokens of 32 bits",
    TOKENS_MARKED: "tokens of which some are marked as not learned",
}


def contents(magic: int) -> str | None:
    """The name of the kind of files that begin with this number; None if no file of ours does."""
    if magic in CONTENTS:
        return CONTENTS[magic]
    name, _ = known_models().get(magic, (None, None))
    return name and f"a {name} model"


def script_of(magic: int | None) -> str | None:
    """The script that trains the models whose files begin with this number; None if no script does."""
    _, script = known_models().get(magic, (None, None))
    return script


@cache
def known_models() -> dict[int, tuple[str, str]]:
    """By the number that its files begin with, each kind of model: its name, and its script.

    llmc/ must not import scripts, so this reads them without running them: the MAGIC and the NAME in the body of a
    class. There they must be literals. A script with a mistake in its syntax is left out.
    """
    found = {}
    for path in sorted(ROOT.glob("train_*.py")):
        try:
            script = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in script.body:
            said = literals(node.body) if isinstance(node, ast.ClassDef) else {}
            if {"MAGIC", "NAME"} <= said.keys():
                found.setdefault(said["MAGIC"], (said["NAME"], path.name))
    return found


def literals(body: list[ast.stmt]) -> dict[str, object]:
    """The names that statements bind to numbers and strings, as `A = 1`, `A: int = 1` and `A, B = 1, x` bind A to 1."""
    found = {}
    for statement in body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            names, values = [target], [statement.value]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                names, values = target.elts, statement.value.elts
            for name, value in zip(names, values, strict=False):  # a starred name may take several values
                if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                    found[name.id] = value.value
    return found
