"""What torch.load refuses since PyTorch 2.6, where weights_only is True: objects in a checkpoint that is loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from .checkpoints import FIXED, UNKNOWN, Saved, parts_of, paths, saved
from .context import Context, Found
from .effects import walk_body
from .module import Call, Class, Function, Module, dotted, is_constant, keyword, names_in, shown
from .origins import Value, call_of, sources, values_of

DATA = re.compile(r"result|data|feat|cache|label|vocab|embed|index", re.IGNORECASE)  # a file that is no checkpoint
PATH = re.compile(r"checkpoint|ckpt|resume|snapshot|save", re.IGNORECASE)  # a name of a checkpoint's path
LOADS = {"load_state_dict", "load_checkpoint", "resume_checkpoint", "resume", "load_model"}
ALLOWED = re.compile(r"safe_globals")
HYDRA = re.compile(r"^\s*(?:import|from) (?:hydra|omegaconf)", re.MULTILINE)
CONTAINER = re.compile(r"to_container|to_object")
SETTINGS = ("args", "opt", "opts", "cfg", "config")
ARRAYS = {f"numpy.{name}" for name in ("zeros", "ones", "array", "arange", "empty", "full", "asarray", "linspace")}
ARRAYS |= {f"numpy.{name}" for name in ("concatenate", "stack", "zeros_like", "ones_like", "vstack", "hstack", "load")}
NUMPY = {"mean", "max", "min", "sum", "median", "average", "nanmean", "std", "float64", "float32", "nansum", "nanmax"}
LIMIT = 200  # expressions that are looked at behind one value
SAME_KIND = {"max", "min", "sum", "abs"}  # of Python's own: what they return is of the kind of what they are given
# What makes an object that torch.load refuses: what that is, and what to save instead.
OBJECTS = {
    "numpy.random.get_state": ("the state of numpy's generator, a tuple with an array,", "list({0}[1])"),
    "numpy.random.default_rng": ("a generator of numpy", "{0}.bit_generator.state"),
    "datetime.datetime.now": ("a datetime", "{0}.isoformat()"),
    "datetime.timedelta": ("a timedelta", "{0}.total_seconds()"),
    "collections.defaultdict": ("a defaultdict", "dict({0})"),
    "pathlib.Path": ("a Path", "str({0})"),
    "collections.deque": ("a deque", "list({0})"),
    "argparse.Namespace": ("an argparse.Namespace", "vars({0})"),
    "types.SimpleNamespace": ("a SimpleNamespace", "vars({0})"),
    "easydict.EasyDict": ("an EasyDict", "dict({0})"),
    "yacs.config.CfgNode": ("a CfgNode of yacs", "{0}.dump()"),
    "ml_collections.ConfigDict": ("a ConfigDict", "{0}.to_dict()"),
    "omegaconf.OmegaConf.load": ("a configuration of OmegaConf", "OmegaConf.to_container({0})"),
    "omegaconf.OmegaConf.create": ("a configuration of OmegaConf", "OmegaConf.to_container({0})"),
    "omegaconf.OmegaConf.merge": ("a configuration of OmegaConf", "OmegaConf.to_container({0})"),
    "omegaconf.OmegaConf.from_cli": ("a configuration of OmegaConf", "OmegaConf.to_container({0})"),
    "sentencepiece.SentencePieceProcessor": ("a tokenizer of sentencepiece", "{0}.serialized_model_proto()"),
}
OPTIMIZERS = re.compile(r"opt|solver", re.IGNORECASE)
WHOLE = ("torch.optim.", "torch.nn.", "torch.cuda.amp.", "torch.amp.", "transformers.")
CONVERTS = re.compile(r"^(?:vars|dict|str|list|asdict|copy|deepcopy)$|\.(?:asdict|to_container|to_dict|copy|deepcopy)$")
TOKENIZER = re.compile(r"okenizer\w*\.from_pretrained$")
PLAIN_BASES = re.compile(r"(?:TypedDict|Protocol)$")


class Refused(NamedTuple):
    """What a value is that torch.load refuses, and what to save instead."""

    what: str
    instead: str


def not_loadable(context: Context, function: Function) -> Iterator[Found]:
    """Yield what torch.load refuses since PyTorch 2.6 (weights_only=True): a Namespace, a number of numpy."""
    kept = [one for call in function.calls if (one := saved(context, call)) is not None]
    if not kept or not context.plain(function.module):
        return
    load = _strict_load(context, function.module)
    if load is None:
        return
    seen: set[int] = set()
    of_parts = _strict_load(context, function.module, parts=True)
    for one in kept:
        whole = _whole(context, function, one.state)
        if whole is not None:
            reads = _load_of(context, one, load)
            if reads is not None:
                yield _told(function, None, one.state, whole, reads)
            continue
        if of_parts is None:
            continue
        for where, key, held in parts_of(context, function, one.state):
            refused = _refused(context, where, held)
            if refused is not None and id(held) not in seen:
                seen.add(id(held))
                yield _told(where, key, held, refused, of_parts)


def optimizer_not_loadable(context: Context, function: Function) -> Iterator[Found]:
    """Yield what makes an optimizer's state one that torch.load refuses: a number of numpy, or a list of OmegaConf."""
    told = next(_in_groups(context, function), None) or next(_in_optimizer(context, function), None)
    if told is None or not context.plain(function.module) or not context.run_by_ranks(function):
        return
    states = [
        c for c in context.calls_in_component(function.module, "state_dict") if OPTIMIZERS.search(dotted(c.node.func))
    ]
    load = _strict_load(context, function.module) if states else None
    if load is not None and any("save" in c.last for s in states for c in s.function.calls):
        node, refused = told
        module = load.function.module
        message = (
            f"`{shown(node, 40)}` is {refused.what}, and gets into the optimizer's state, which torch.load refuses"
            f" since PyTorch 2.6 (weights_only is True): its checkpoint cannot be loaded ({module.file.path} line"
            f" {module.position(load.node.lineno)[1]})"
        )
        yield Found("DDP305", function.module, node, message, f"write `{refused.instead.format(shown(node, 40))}`")


def _in_groups(context: Context, function: Function) -> Iterator[tuple[ast.expr, Refused]]:
    """Yield a number of numpy that is set as `group["lr"]`."""
    if "param_group" not in function.module.file.text or isinstance(function.node, ast.Module):
        return
    for statement in function.node.body:
        for part in walk_body(statement):
            target = part.targets[0] if isinstance(part, ast.Assign) else None
            if (
                isinstance(part, ast.Assign)
                and isinstance(target, ast.Subscript)
                and "group" in ast.unparse(target.value)
                and is_of_numpy(context, function, part.value)
            ):
                yield part.value, Refused("a number of numpy", "float({0})")


def _in_optimizer(context: Context, function: Function) -> Iterator[tuple[ast.expr, Refused]]:
    """Yield betas that an optimizer is given as OmegaConf has them."""
    for call in function.calls:
        given = keyword(call.node, "betas") if call.name.startswith("torch.optim.") else None
        parts = dotted(given).split(".") if given is not None else []
        if len(parts) < 2 or given is None or not any(part in SETTINGS for part in parts[:2]):
            continue
        if context.says(function.module, HYDRA) and not context.says(function.module, CONTAINER):
            yield given, Refused("a ListConfig of OmegaConf", "tuple({0})")


def _load_of(context: Context, one: Saved, load: Call) -> Call | None:
    """Return a load that may read the file of an object that is saved alone: where its name stands, if it has one."""
    names = {path.text.rpartition("/")[2] for path in paths(context, one.call, one.path)}
    if (
        isinstance(one.state, ast.Attribute)
        or not names
        or any(not name or FIXED in name or UNKNOWN in name for name in names)
    ):
        return load
    programs = context.programs_with(one.call.function.module)
    for other in context.calls_in_component(load.function.module, "load"):
        near = any(other.function.module is module for part in programs for module in part)
        if near and other.name == "torch.load" and other.node.args and not _takes_all(other):
            read = {path.text.rpartition("/")[2] for path in paths(context, other, other.node.args[0])}
            if names & read:
                return other
    return None


def _strict_load(context: Context, module: Module, parts: bool = False) -> Call | None:
    """Return a torch.load of these files that takes weights only, of a checkpoint if there is one; the nearest.

    `parts` is for one of a file that has several: not what load_state_dict is given as it is.
    """
    component = context.calls_in_component(module, "load")
    strict = [c for c in component if c.name == "torch.load" and not _takes_all(c)]
    strict = [c for c in strict if not any(DATA.search(name) for a in c.node.args[:1] for name in names_in(a))]
    if parts:
        states = [c for c in context.calls_in_component(module, "load_state_dict") if c.node.args]
        at_once = {id(c.node.args[0]) for c in states}
        strict = [c for c in strict if id(c.node) not in at_once]
    if not strict or context.says(module, ALLOWED):
        return None
    return min(strict, key=lambda c: (c.function.module is not module, not _loads_checkpoint(c.function, c)))


def _takes_all(call: Call) -> bool:
    """Tell whether a load is given weights_only, other than True, or keywords that are not seen."""
    given = keyword(call.node, "weights_only")
    return (given is not None and not is_constant(given, True)) or any(k.arg is None for k in call.node.keywords)


def _loads_checkpoint(function: Function, call: Call) -> bool:
    named = any(PATH.search(name) for value in call.node.args[:1] for name in names_in(value))
    return named or PATH.search(function.name) is not None or any(c.last in LOADS for c in function.calls)


def _told(function: Function, key: ast.expr | None, held: ast.expr, refused: Refused, load: Call) -> Found:
    _, line = load.function.module.position(load.node.lineno)
    where = f"{load.function.module.file.path} line {line}"
    message = (
        f"`{shown(held, 30)}` is {refused.what}, which torch.load refuses since PyTorch 2.6"
        f" (weights_only is True): this file cannot be loaded ({where})"
    )
    fix = f"save `{refused.instead.format(shown(held, 30))}`" + (f" under {shown(key)}" if key else " itself")
    return Found("DDP305", function.module, held, message, fix)


def _whole(context: Context, function: Function, node: ast.expr) -> Refused | None:
    """Return what is refused where a module or an object is saved itself, and not a dict of its state."""
    if isinstance(node, ast.Attribute) and node.attr == "module":
        return Refused("the module itself and not its state", "{0}.state_dict()")
    if isinstance(node, ast.Name) and node.id == "self" and function.of_class is not None:
        return _of_class(function.of_class)
    return _object(context, function, node)


def _refused(context: Context, function: Function, held: ast.expr) -> Refused | None:
    """Return what a value in a checkpoint is, if torch.load refuses it."""
    last = dotted(held).rpartition(".")[2]
    found = _object(context, function, held)
    if found is not None:
        return found
    if _is_settings(context, function, held):
        return Refused("an object of settings", "dict({0})")
    if last in ("args", "opt", "opts") and isinstance(held, ast.Name) and _parsed(context, function, held.id):
        return Refused("an argparse.Namespace", "vars({0})")
    if _has_arrays(context, function, held):
        return Refused("an array of numpy", "torch.from_numpy({0})")
    if is_of_numpy(context, function, held):
        return Refused("a number of numpy", "float({0})")
    if _list_of_numpy(context, function, held):
        return Refused("a list of numbers of numpy", "[float(one) for one in {0}]")
    return None


def _object(context: Context, function: Function, node: ast.expr) -> Refused | None:
    """Return what an object is that torch.load refuses, by what makes it."""
    values = values_of(context, function, node)
    if any(isinstance(v.node, ast.Call) and CONVERTS.search(v.function.module.full_name(v.node.func)) for v in values):
        return None
    for value in values:
        if isinstance(value.node, ast.Call) and (found := _made(context, value, value.node)) is not None:
            # A dict that is a defaultdict in one branch alone is often not saved there.
            return found if found.what != OBJECTS["collections.defaultdict"][0] or len(values) == 1 else None
        if isinstance(value.node, ast.Name) and (made := _annotated(context, value.function, value.node.id)):
            return _of_class(made)
    return None


def _made(context: Context, value: Value, node: ast.Call) -> Refused | None:
    """Return what a call makes, if torch.load refuses that."""
    name = value.function.module.full_name(node.func)
    if name in OBJECTS:
        return Refused(*OBJECTS[name])
    if name.startswith(WHOLE) and re.fullmatch(r"[A-Z]\w+", name.rpartition(".")[2]) and "Parameter" not in name:
        return Refused("the object itself and not its state", "{0}.state_dict()")
    if TOKENIZER.search(name):
        return Refused("a tokenizer", "{0}.name_or_path")
    call = call_of(value.function, node)
    target = context.program.called(call) if call is not None else None
    if name.rpartition(".")[2] == "parse_args" and (target is None or target.name == "__init__"):
        return Refused("an argparse.Namespace", "vars({0})")
    found = context.program.lookup(value.function.module, dotted(node.func)) if dotted(node.func) else None
    return _of_class(found) if isinstance(found, Class) else None


def _of_class(made: Class) -> Refused | None:
    if any(PLAIN_BASES.search(base) for base in made.bases):
        return None
    instead = "{0}.state_dict()" if "state_dict" in made.methods or "forward" in made.methods else "vars({0})"
    return Refused(f"an object of the class {made.name}", instead)


def _annotated(context: Context, function: Function, name: str) -> Class | None:
    """Return the class of these files that a parameter is said to be of."""
    if isinstance(function.node, ast.Module) or name not in function.parameters or name in function.assignments:
        return None
    given = function.node.args
    said = next((a.annotation for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg == name), None)
    found = context.program.lookup(function.module, dotted(said)) if said is not None and dotted(said) else None
    return found if isinstance(found, Class) else None


def _has_arrays(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a value is only ever made as an array of numpy."""
    ends = [v for v in values_of(context, function, node) if not sources(context, *v) and not is_constant(v.node, None)]
    made = [v for v in ends if isinstance(v.node, ast.Call) and v.function.module.full_name(v.node.func) in ARRAYS]
    return bool(made) and all(v in made or _is_item(v.node) for v in ends)


def _is_item(node: ast.expr) -> bool:
    """Tell whether a value is read from a checkpoint, `state["best"]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)


def is_of_numpy(context: Context, function: Function, node: ast.expr, seen: set[int] | None = None) -> bool:
    """Tell whether an expression surely is a number of numpy in some turn of a loop, as `np.mean(...)` is.

    `seen` are the expressions that have been looked at, and are none.
    """
    seen = set() if seen is None else seen
    for value in values_of(context, function, node):
        if id(value.node) not in seen and len(seen) < LIMIT:
            seen.add(id(value.node))
            if _numpy_itself(context, *value, seen):
                return True
    return False


def _numpy_itself(context: Context, function: Function, node: ast.expr, seen: set[int]) -> bool:
    """Tell whether an expression makes a number of numpy: a mean, a sum with one, an element of an array."""
    if isinstance(node, ast.BinOp):
        return any(is_of_numpy(context, function, side, seen) for side in (node.left, node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return is_of_numpy(context, function, node.operand, seen)
    if isinstance(node, ast.Subscript):
        return not isinstance(node.slice, (ast.Slice, ast.Tuple)) and _of_part(context, function, node, seen)
    if not isinstance(node, ast.Call):
        return False
    name = function.module.full_name(node.func)
    if name.startswith("numpy.") and name.rpartition(".")[2] in NUMPY and name.count(".") == 1:
        return not any(word.arg in ("axis", "keepdims") for word in node.keywords) and len(node.args) == 1
    if name in SAME_KIND or (name == "round" and len(node.args) == 2):
        given = node.args[:1] if name == "round" else node.args
        return any(is_of_numpy(context, function, one, seen) for one in given)
    return _of_array(context, function, node)


def _of_part(context: Context, function: Function, node: ast.Subscript, seen: set[int]) -> bool:
    """Tell whether an element is one of an array of numpy, or stands as a number of numpy under a key of a dict."""
    if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        held = ((w, v) for w, key, v in parts_of(context, function, node.value) if key and _same(key, node.slice))
        return any(is_of_numpy(context, where, value, seen) for where, value in held)
    return _has_arrays(context, function, node.value)


def _same(key: ast.expr, other: ast.Constant) -> bool:
    return isinstance(key, ast.Constant) and key.value == other.value


def _of_array(context: Context, function: Function, node: ast.Call) -> bool:
    """Tell whether a call is the mean, the maximum or the like of an array of numpy, over all of it."""
    if not isinstance(node.func, ast.Attribute) or node.args or node.keywords:
        return False
    owner = node.func.value
    from_tensor = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "numpy"
    return node.func.attr in NUMPY - {"float64", "float32"} and (from_tensor or _has_arrays(context, function, owner))


def _list_of_numpy(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a value is a list to which a number of numpy is appended."""
    for where, value in values_of(context, function, node):
        name = dotted(value)
        added = (c for c in where.calls if name and c.last == "append" and dotted(c.node.func) == f"{name}.append")
        if any(is_of_numpy(context, where, call.node.args[0]) for call in added if call.node.args):
            return True
    return False


def _is_settings(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a value is `self.args` of argparse, or a configuration of Hydra."""
    if not dotted(node) or dotted(node).rpartition(".")[2] not in SETTINGS:
        return False
    if context.says(function.module, HYDRA):
        return not context.says(function.module, CONTAINER)
    parsed = bool(context.calls_in_component(function.module, "parse_args"))
    return isinstance(node, ast.Attribute) and node.attr in ("args", "opt", "opts") and parsed


def _parsed(context: Context, function: Function, name: str) -> bool:
    """Tell whether a parameter may be a Namespace: these files parse one, and no caller is seen that gives another."""
    return name in function.parameters and bool(context.calls_in_component(function.module, "parse_args"))


RULES = ()
OF_RANKS = (not_loadable, optimizer_not_loadable)
