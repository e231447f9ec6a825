"""One Python file as the rules of `adopt` see it: what its names mean, and which of its lines only rank 0 reaches."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

# A name that holds a rank, and one that is true on rank 0 only.
RANK = re.compile(r"(?:.*_)?rank|rank_id|(?:local_|gpu_)id|gpu|process_(?:id|idx|index)", re.IGNORECASE)
MAIN = re.compile(r"(?:is_)?(?:main|master)(?:_process|_rank|_proc)?|is_rank_?(?:0|zero)|is_(?:chief|primary)")
ONLY_MAIN = re.compile(r"rank_?(?:zero|0)(?:_only)?|(?:on_)?(?:main|master)(?:_process)?(?:_only)?")
ALONE = re.compile(r"distribut|initialized|available|world_size|parallel|multi|ddp")  # not ...: one process
ENTRIES = ("main", "train", "main_worker", "run_training")
# These bring process groups and loops of their own, so advice for a plain loop would be wrong.
FRAMEWORKS = ("accelerate", "deepspeed", "fairscale", "horovod", "ignite", "lightning", "pytorch_lightning")


@dataclass(frozen=True)
class Module:
    """A file that was read: its path as POSIX text below the repository, its lines, its syntax tree."""

    path: str
    lines: list[str]
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)  # of imports: `dist` is `torch.distributed`

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the node that holds each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Return every call in the order of lines, with the full name of what is called."""
        found = [(node, self.full_name(node.func)) for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset))

    @cached_property
    def knows_ranks(self) -> bool:
        """Tell whether it imports anything of torch for several processes."""
        mine = set(self.names.values())
        full = {self.full_name(node) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        return any("istributed" in name for name in mine | full if name.startswith("torch."))

    @property
    def framework(self) -> str:
        """Return the framework that it imports, if any."""
        first = {name.partition(".")[0] for name in self.names.values()}
        return next((name for name in FRAMEWORKS if name in first), "")

    def full_name(self, node: ast.AST) -> str:
        """Return `torch.distributed.barrier` for `dist.barrier`; without a known import, the name as it stands."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["?", *reversed(parts)]) if parts else ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])

    def text(self, line: int) -> str:
        """Return a line, short enough to show."""
        text = " ".join(self.lines[line - 1].split()) if line <= len(self.lines) else ""
        return text if len(text) <= 100 else f"{text[:97]}..."

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (parent, child) from `node` up to the whole file."""
        while node in self.parents:
            parent = self.parents[node]
            yield parent, node
            node = parent

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the innermost function that holds `node`."""
        functions = (p for p, _ in self.above(node) if isinstance(p, (ast.FunctionDef, ast.AsyncFunctionDef)))
        return next(functions, None)

    def rank0_if(self, node: ast.AST) -> ast.If | None:
        """Return the outermost `if rank == 0:` of its function that holds `node`."""
        found = None
        for parent, child in self.above(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                break
            if isinstance(parent, ast.If) and self._branch(parent, child) == 0:
                found = parent
        return found

    def only_rank0(self, node: ast.AST) -> bool:
        """Tell whether `node` stands where only rank 0 comes: in such an `if`, or after the others have left."""
        if self.rank0_if(node) is not None:
            return True
        for parent, child in self.above(node):
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(parent, block, None)
                if isinstance(statements, list) and child in statements:
                    before = statements[: statements.index(child)]
                    if any(isinstance(s, ast.If) and self.is_rank0(s.test) == 1 and _leaves(s.body) for s in before):
                        return True
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = (self.full_name(getattr(d, "func", d)).rpartition(".")[2] for d in parent.decorator_list)
                return any(ONLY_MAIN.fullmatch(name) for name in decorators)
        return False

    def only_others(self, node: ast.AST) -> bool:
        """Tell whether `node` stands where rank 0 does not come."""
        return any(isinstance(p, ast.If) and self._branch(p, child) == 1 for p, child in self.above(node))

    def _branch(self, node: ast.If, child: ast.AST) -> int | None:
        """Return 0 if only rank 0 gets to `child` of this `if`, 1 if only the others do, else None."""
        side = self.is_rank0(node.test)
        if child in node.body or side is None:
            return side if child in node.body else None
        return 1 - side if child in node.orelse and not isinstance(node.test, ast.BoolOp) else None

    def is_rank0(self, test: ast.expr) -> int | None:
        """Return 0 for a condition that holds on rank 0 only, 1 for one that holds on the others only, else None."""
        if isinstance(test, ast.BoolOp):
            sides = [self.is_rank0(value) for value in test.values]
            if isinstance(test.op, ast.And):
                return 0 if 0 in sides else 1 if 1 in sides else None
            rest = [value for value, side in zip(test.values, sides, strict=True) if side != 0]
            return 0 if 0 in sides and all(ALONE.search(ast.unparse(value)) for value in rest) else None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.is_rank0(test.operand)
            if inner is None:
                return 0 if self._is_rank(test.operand) else None
            return 1 - inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            op, right = test.ops[0], test.comparators[0]
            if not self._is_rank(test.left):
                return None
            if isinstance(op, (ast.In, ast.NotIn)):
                constants = [e.value for e in getattr(right, "elts", ()) if isinstance(e, ast.Constant)]
                return (0 if isinstance(op, ast.In) else 1) if 0 in constants else None
            if isinstance(right, ast.Constant) and right.value == 0 and not isinstance(right.value, bool):
                return {ast.Eq: 0, ast.LtE: 0, ast.NotEq: 1, ast.Gt: 1}.get(type(op))
            return None
        name = self.full_name(test.func if isinstance(test, ast.Call) else test).rpartition(".")[2]
        return 0 if MAIN.fullmatch(name) else None

    def _is_rank(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # rank % gpus_per_node
            node = node.left
        name = self.full_name(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
        return bool(RANK.fullmatch(name))


def _leaves(body: list[ast.stmt]) -> bool:
    """Tell whether a block ends in return, raise or continue."""
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue))


def parse(path: str, content: bytes) -> Module | None:
    """Read a file; None if it is no Python that this Python understands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes, which are the user's
            tree = ast.parse(content)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding, errors="replace")
    except (SyntaxError, ValueError, RecursionError, MemoryError, LookupError):
        return None
    module = Module(path, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module.names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return module


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Tell whether an expression is this constant, of this type."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
