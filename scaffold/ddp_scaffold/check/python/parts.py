"""Which files of a tree belong together, told from their text: those that import each other, directly or not.

A part can be read by itself, and one that never mentions what the rules are about need not be read at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..files import SourceFile
from .module import Module, code_of
from .program import Program

IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*[ \t]*[\w.]*)(?:[ \t]|\\\n)+import\b|import[ \t]+)", re.MULTILINE
)
NAME = re.compile(r"(\w[\w.]*|\*)(?:[ \t]+as[ \t]+\w+)?")
COMMENT = re.compile(r"#[^\n]*")
# A part without any of these words has nothing that ranks do together, and nothing of torch.
SUBJECT = re.compile(
    r"torch|accelerat|lightning|fabric|horovod|hvd|transformers|deepspeed|mmengine|detectron2|ignite|xla|signal"
    r"|setattr|register_|barrier|all_?reduce|all_?gather|broadcast|scatter|gather|reduce|_DEFAULT_PG_TIMEOUT"
    r"|init_process_group|DDP|DistributedDataParallel|strategy|retry|environ",
    re.IGNORECASE,
)


def parts_of(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Return the files of Python in parts: no file imports one of another part."""
    modules = [_outlined(file) for file in files]
    component = Program(modules).component
    found: dict[int, list[SourceFile]] = {}
    for module in modules:
        found.setdefault(component[id(module)], []).append(module.file)
    return list(found.values())


def concerns(part: Sequence[SourceFile]) -> bool:
    """Tell whether a rule may find something in a part."""
    return any(SUBJECT.search(file.text) for file in part)


def _outlined(file: SourceFile) -> Module:
    """Return a file with what it imports and nothing else. It may be too much: comments count too."""
    module = Module(file)
    try:
        text = code_of(file)[0] if file.kind == "notebook" else file.text
    except ValueError:
        return module
    for number, (base, name) in enumerate(_imports(text)):
        if name == "*":
            module.stars.append(base)
        else:
            module.relative[str(number)] = (base, name)
    return module


def _imports(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module as written, name in it) of each import; the name is empty for `import a.b`."""
    for match in IMPORT.finditer(text):
        stop = text.find("\n", match.end())
        rest = text[match.end() : stop if stop >= 0 else len(text)]
        if rest.lstrip().startswith("("):
            rest = COMMENT.sub("", text[match.end() : match.end() + 20_000]).partition(")")[0]
        while rest.endswith("\\") and stop >= 0:
            begin, stop = stop + 1, text.find("\n", stop + 1)
            rest = rest[:-1] + text[begin : stop if stop >= 0 else len(text)]
        base = match.group(1)
        for name in NAME.finditer(rest.partition("#")[0] if "\n" not in rest else rest):
            yield (base.replace(" ", ""), name.group(1)) if base is not None else (name.group(1), "")
