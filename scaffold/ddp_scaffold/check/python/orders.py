"""Rules for orders that ranks have to agree on: of a shuffle that nothing seeds, of a set, of a listing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .module import Call, Class, Function, arguments_of, dotted, dotted_names, is_constant, keyword, names_in, shown
from .samplers import SAMPLER
from .seeds import SEEDS

TEXTS = re.compile(r"split\(|basename|listdir|glob|keys\(\)|names?\b|paths?\b|files?\b|phoneme|caption|words?\b|video")
LISTS = re.compile(r"os\.(?:listdir|scandir|walk)|glob\.i?glob|(?:.*\.)?glob")
SORTS = re.compile(r"sort|shuffle|OrderedDict")
NUMBERS = re.compile(r"\bint\(|tolist\(|range\(")


def orders(context: Context, function: Function) -> Iterator[Found]:
    """Yield orders that differ between ranks: of a shuffle that nothing seeds, of a set that makes modules."""
    yield from _sets(context, function)
    yield from _own_order(context, function)
    yield from _texts_of_set(context, function)
    if not context.plain(function.module):
        return
    for call in function.calls:
        truly = call.name.startswith("random.SystemRandom") or (
            call.last == "shuffle"
            and isinstance(call.node.func, ast.Attribute)
            and isinstance(call.node.func.value, ast.Call)
            and "SystemRandom" in ast.unparse(call.node.func)
        )
        plain = call.name in (
            "random.shuffle",
            "numpy.random.shuffle",
            "numpy.random.permutation",
            "torch.randperm",
            "torch.utils.data.random_split",
            "random.sample",
        )
        if not (truly or plain) or keyword(call.node, "generator") is not None or not _in_data(function):
            continue
        if not truly and any(context.calls_in_component(function.module, last) for last in SEEDS):
            continue
        if truly and call.last != "shuffle":
            continue
        if not context.calls_in_component(function.module, SAMPLER):
            continue
        message = (
            f"`{shown(call.node, 40)}` gives another order on every rank: the sampler shares out positions, so some"
            " samples are read by several ranks and others by none"
        )
        fix = "use a generator with a seed that all ranks have, for example random.Random(seed).shuffle(...)"
        yield Found("DDP207", function.module, call.node, message, fix)


def _own_order(context: Context, function: Function) -> Iterator[Found]:
    """Yield an order that a sampler draws from the generator of each rank, and then shares out by position."""
    owner = function.of_class
    if function.name != "__iter__" or owner is None or not any(base.endswith("Sampler") for base in owner.bases):
        return
    if not context.plain(function.module) or not {"rank", "num_replicas"} & names_in(function.node):
        return
    named = re.compile(rf"\b{owner.name}\b")
    if sum(len(named.findall(text)) for text in context.texts) < 2:
        return  # nothing makes one
    seeds = (c for last in SEEDS for c in context.calls_in_component(function.module, last))
    if any(c.name.startswith("torch.") or "." not in c.name for c in seeds):
        return
    for call in function.calls:
        if call.name == "torch.randperm" and keyword(call.node, "generator") is None:
            message = (
                f"`{shown(call.node, 40)}` draws from the generator of the rank, which nothing seeds: each rank has"
                " another order and takes its part of that, so some samples are read by several ranks, others by none"
            )
            fix = f"give it a generator with a seed that all ranks have, `{shown(call.node.func)}(..., generator=g)`"
            yield Found("DDP207", function.module, call.node, message, fix)


def _texts_of_set(context: Context, function: Function) -> Iterator[Found]:
    """Yield samples or classes in the order of a set of texts, which each process hashes in another way."""
    if not (context.plain(function.module) and any("set" in c.last for c in function.calls) and _in_data(function)):
        return
    if not context.calls_in_component(function.module, SAMPLER):
        return
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            value = assignment.value
            listed = isinstance(value, ast.Call) and dotted(value.func) in ("list", "tuple") and len(value.args) == 1
            if not listed or value is None or not _is_set_of_texts(value.args[0]):  # type: ignore[attr-defined]
                continue
            if _sorted_behind(function, name, assignment.order) or not _makes_order(function, name):
                continue
            message = (
                f"the order of a set of texts differs from process to process, and so does that of `{name}`: the"
                " same number means another sample or class on each rank"
            )
            fix = f"write `sorted(...)` instead of `{dotted(value.func)}(...)`"  # type: ignore[attr-defined]
            yield Found("DDP207", function.module, value, message, fix)


def _is_set_of_texts(node: ast.expr) -> bool:
    """Tell whether an expression is a set, of texts as far as its names tell."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub)):
        node = node.left
    made = isinstance(node, ast.Call) and dotted(node.func) == "set" and bool(node.args)
    text = ast.unparse(node)
    return (made or isinstance(node, ast.SetComp)) and bool(TEXTS.search(text)) and not NUMBERS.search(text)


def _sorted_behind(function: Function, name: str, order: int) -> bool:
    behind = (c for c in function.calls if c.order >= order)
    return any(
        dotted(c.node.func) == f"{name}.sort" or (c.last == "sorted" and c.node.args and dotted(c.node.args[0]) == name)
        for c in behind
    )


def _makes_order(function: Function, name: str) -> bool:
    """Tell whether an object keeps a list, or a loop over it fills what the object keeps."""
    if name.startswith("self."):
        return True
    loops = [loop for loop, _ in function.loops if isinstance(loop, ast.For) and name in dotted_names(loop.iter)]
    parts = (part for loop in loops for part in ast.walk(loop))
    return any(isinstance(part, ast.Attribute) and dotted(part).startswith("self.") for part in parts)


def files(context: Context, function: Function) -> Iterator[Found]:
    """Yield a data set whose samples are the files of a folder in the order in which the file system gives them."""
    owner = function.of_class
    if function.name != "__init__" or owner is None or not context.plain(function.module):
        return
    made = context.program.hierarchy(owner)
    by_number = any("__getitem__" in one.methods and not _gives_nothing(one.methods["__getitem__"]) for one in made)
    if not by_number or not any(re.search("Dataset|data", base) for one in made for base in one.bases):
        return
    if not context.calls_in_component(function.module, SAMPLER):
        return
    listed = [c for c in function.calls if LISTS.fullmatch(c.name) or c.last in ("rglob", "iterdir")]
    call = next((c for c in listed if _is_kept(function, c) and not _is_drawn(function, owner, c)), None)
    if call is None:
        return
    message = (
        f"`{shown(call.node, 40)}` gives the files in the order of the file system, which differs between the local"
        " disks of nodes: the number that a sampler gives out is another sample there, so some are read twice or never"
    )
    fix = f"write `sorted({shown(call.node, 40)})`"
    yield Found("DDP642", function.module, call.node, message, fix)


def _gives_nothing(function: Function) -> bool:
    """Tell whether a method does nothing but to return None or to raise: who has the object asks another one."""
    body = getattr(function.node, "body", [])
    kinds = (ast.Raise, ast.Pass, ast.Expr)
    return all(
        isinstance(one, kinds) or (isinstance(one, ast.Return) and (one.value is None or is_constant(one.value, None)))
        for one in body
    )


def _is_drawn(function: Function, owner: Class, call: Call) -> bool:
    """Tell whether files are only drawn from at random, whatever number the sampler gives out: `random.choice(...)`."""
    names = {name for name, assigned in function.assignments.items() if any(_has(a.value, call) for a in assigned)}
    names = {name for name in names if name.startswith("self.")}
    uses = [p for p in ast.walk(owner.node) if isinstance(p, ast.Attribute) and isinstance(p.ctx, ast.Load)]
    uses = [part for part in uses if dotted(part) in names]
    draws = [part for part in ast.walk(owner.node) if isinstance(part, (ast.Call, ast.Subscript)) and _draws(part)]
    inside = {id(part) for one in draws for part in ast.walk(one)}
    drawn = [part for part in uses if id(part) in inside]
    counted = [
        p for one in ast.walk(owner.node) if isinstance(one, ast.Call) and dotted(one.func) == "len" for p in one.args
    ]
    return bool(drawn) and all(part in drawn or part in counted for part in uses)


def _draws(node: ast.Call | ast.Subscript) -> bool:
    """Tell whether an expression is `random.choice(...)`, or an element at a random place."""
    if isinstance(node, ast.Call):
        return dotted(node.func) in ("random.choice", "random.sample", "np.random.choice", "numpy.random.choice")
    calls = (part for part in ast.walk(node.slice) if isinstance(part, ast.Call))
    return any(
        re.match(r"(?:random|np\.random|numpy\.random|torch)\.(?:rand|choice)", dotted(one.func)) for one in calls
    )


def _is_kept(function: Function, call: Call) -> bool:
    """Tell whether an object keeps the order of a listing: as it is, or what a loop over it adds to a list."""
    unordered = [c.node for c in function.calls if c.last in ("set", "frozenset", "len")]
    if any(_has(one, call) for one in unordered):
        return False
    names = {name for name, assigned in function.assignments.items() if any(_has(a.value, call) for a in assigned)}
    loops = [
        x for x, _ in function.loops if isinstance(x, ast.For) and (_has(x.iter, call) or names & dotted_names(x.iter))
    ]
    adds = (c for c in function.calls if c.last in ("append", "extend") and set(loops) & set(c.place.loops))
    kept = names | {dotted(c.node.func).rpartition(".")[0] for c in adds}
    sorts = [c.node for c in function.calls if SORTS.search(dotted(c.node.func))]
    if any(_has(one, call) or kept & dotted_names(one) for one in sorts):
        return False
    if any(name.startswith("self.") for name in kept):
        return True
    values = [a.value for name, assigned in function.assignments.items() if name.startswith("self.") for a in assigned]
    values += [one for c in function.calls if c.last == "__init__" for one in arguments_of(c.node)]  # of a base
    return any(_of_order(value) in kept for value in values if value is not None)


def _of_order(value: ast.expr) -> str:
    """Return the variable whose order a value has: the variable itself, or a list of what is in it."""
    if isinstance(value, ast.ListComp) and len(value.generators) == 1:
        value = value.generators[0].iter
    return dotted(value)


def _has(node: ast.AST | None, call: Call) -> bool:
    return node is not None and any(part is call.node for part in ast.walk(node))


def _in_data(function: Function) -> bool:
    """Tell whether a function makes a data set: the constructor of one, or a function that is called so."""
    if function.of_class is not None:
        bases = " ".join([*function.of_class.bases, function.of_class.name])
        return re.search("Dataset|ImageFolder|DatasetFolder", bases) is not None and function.name == "__init__"
    return bool(re.search(r"data|split|loader", function.name.lower())) or any(
        c.last == SAMPLER for c in function.calls
    )


def _sets(context: Context, function: Function) -> Iterator[Found]:
    makes = ("register_buffer", "register_parameter", "add_module", "register_module", "setattr")
    for loop, _ in function.loops:
        if not isinstance(loop, ast.For) or not _unordered(loop.iter):
            continue
        inner = [c for c in function.calls if loop in c.place.loops and c.last in makes]
        if inner and function.of_class is not None:
            yield _set_found(function, loop.iter, inner[0].last)
    for call in function.calls:
        if call.name not in (
            "torch.nn.ModuleDict",
            "torch.nn.ModuleList",
            "torch.nn.ParameterDict",
            "torch.nn.Sequential",
        ):
            continue
        for part in ast.walk(call.node):
            if isinstance(part, ast.comprehension) and _unordered(part.iter):
                yield _set_found(function, part.iter, call.last)


def _set_found(function: Function, node: ast.expr, what: str) -> Found:
    message = (
        f"the order of a set of texts differs from process to process, and {what} takes it over: DDP pairs parameters"
        " and buffers by position, so ranks exchange the wrong tensors"
    )
    inner = (
        node.args[0] if isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple") and node.args else node
    )
    return Found("DDP208", function.module, node, message, f"write `sorted({shown(inner, 40)})`")


def _unordered(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple", "enumerate") and node.args:
        return _unordered(node.args[0])
    if isinstance(node, (ast.Set, ast.SetComp)):
        numbers = isinstance(node, ast.Set) and all(
            isinstance(e, ast.Constant) and type(e.value) is int for e in node.elts
        )
        return not numbers
    return isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset") and not _of_numbers(node)


def _of_numbers(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[0], ast.Call) and dotted(node.args[0].func) == "range"


RULES = (orders,)
OF_RANKS = (files,)  # only where several ranks run the file
