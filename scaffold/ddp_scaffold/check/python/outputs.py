"""What a call writes, whether its name is the same on all ranks, and whether all ranks come to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from .context import Context
from .everywhere import OWN, is_started, starts_ranks
from .module import (
    Assignment,
    Call,
    Function,
    Guard,
    argument,
    arguments_of,
    default_of,
    dotted,
    is_constant,
    keyword,
    last_of,
    names_in,
)
from .waiting import barriers_around

SETTINGS = re.compile(
    r"_{0,2}(?:.*_)?(?:args?|opts?|options?|cfgs?|conf|configs?|configuration|hps?|hparams|params?|flags?|para|settings?)"
    r"|C|H|FLAGS|CONFIG",
    re.IGNORECASE,
)
CHOSEN = re.compile(r"log|save|write|verbose|main|master|print|rank|primary|leader|dump|gpu|dist", re.IGNORECASE)
# Words in a name that is another one on each rank, and of what each rank has a part of.
RANKS_OWN = re.compile(
    r"rank|gpu|\bpid|host|local_?id|node|worker|temp(?!l|erat)|tmp|loader|batch(?!_?size)", re.IGNORECASE
)
COUNTER = re.compile(r"(?:\w*_)?(?:epochs?|steps?|iters?|itr|iterate|iteration|ep|num_iter|it)", re.IGNORECASE)
OF_RANK = re.compile(r"rank|main|master|first|zero|local|gpu|node", re.IGNORECASE)
EXISTS = re.compile(r"exists\(|isfile\(|is_file\(|isdir\(|is_dir\(|listdir\(|glob\(")
PICTURE = re.compile(r"\.(?:png|jpe?g|bmp|tiff?|gif|webp)$", re.IGNORECASE)
# What writes a file: the position of the path, and the keyword that may give it.
BY_NAME = {
    **{f"numpy.{name}": (0, "file") for name in ("save", "savez", "savez_compressed")},
    **{f"imageio.{name}": (0, "uri") for name in ("imwrite", "imsave", "mimsave", "mimwrite", "get_writer")},
    **{f"imageio.v2.{name}": (0, "uri") for name in ("imwrite", "imsave", "mimsave", "mimwrite", "get_writer")},
    **{f"matplotlib.pyplot.{name}": (0, "fname") for name in ("savefig", "imsave")},
    **{f"shutil.{name}": (1, "dst") for name in ("copy", "copy2", "copyfile", "copytree", "move")},
    **{f"cv2.{name}": (0, "filename") for name in ("imwrite", "VideoWriter")},
    "numpy.savetxt": (0, "fname"),
    "scipy.io.savemat": (0, "file_name"),
    "scipy.io.wavfile.write": (0, "filename"),
    "scipy.misc.imsave": (0, "name"),
    "scipy.sparse.save_npz": (0, "file"),
    "skimage.io.imsave": (0, "fname"),
    "soundfile.write": (0, "file"),
    "torchaudio.save": (0, "uri"),
    "tifffile.imwrite": (0, "file"),
    "nibabel.save": (1, "filename"),
    "joblib.dump": (1, "filename"),
    "omegaconf.OmegaConf.save": (1, "f"),
    "torchvision.utils.save_image": (1, "fp"),
    "torchvision.io.write_video": (0, "filename"),
    "torchvision.io.write_png": (1, "filename"),
    "torchvision.io.write_jpeg": (1, "filename"),
    "os.rename": (1, "dst"),
    "os.replace": (1, "dst"),
}
BY_LAST = {f"to_{name}": (0, "path_or_buf") for name in ("csv", "json", "pickle", "parquet", "excel", "feather")}
BY_LAST |= {"savefig": (0, "fname"), "tofile": (0, "fid"), "write_html": (0, "file"), "write_image": (0, "file")}
MOVES = {"os.rename", "os.replace", "shutil.move"}
SAME = {
    *("os.path.join", "str", "os.path.abspath", "os.path.realpath", "os.path.dirname", "os.path.expanduser", "len"),
    *("pathlib.Path", "os.fspath", "os.path.basename", "os.path.normpath", "os.path.splitext", "os.path.split", "int"),
    *("os.getcwd", "pathlib.Path.cwd", "max", "min", "round", "float", "repr", "sorted", "list", "tuple", "set"),
    *("range", "zip", "os.path.relpath", "os.path.expandvars", "osp.join"),
}
SAME_METHODS = {
    *("format", "joinpath", "with_suffix", "with_name", "replace", "split", "rsplit", "strip", "lstrip", "rstrip"),
    *("lower", "upper", "zfill", "title", "partition", "rpartition", "resolve", "absolute", "as_posix", "expanduser"),
    *("keys", "items", "values", "join", "removesuffix", "removeprefix", "index"),
}
SAME_PARTS = {"parent", "name", "stem", "suffix", "parents"}  # of a path
MAX_DEPTH = 10
MAX_CALLERS = 5
MANY = 8


def written(context: Context, call: Call) -> tuple[ast.expr | None, str]:
    """Return the path to which a call writes, and how: the mode of `open`, "w" for what makes a file, "move"."""
    node, last = call.node, call.last
    if call.name in ("open", "io.open", "codecs.open", "gzip.open") and node.args:
        mode = node.args[1] if len(node.args) > 1 else keyword(node, "mode")
        return _opened(node.args[0], mode)
    if last == "open" and isinstance(node.func, ast.Attribute) and len(node.args) == 1 and call.name != "Image.open":
        return _opened(node.func.value, node.args[0])
    if last in ("write_text", "write_bytes") and isinstance(node.func, ast.Attribute):
        return node.func.value, "w"
    if call.name in ("h5py.File", "zipfile.ZipFile", "tarfile.open") and len(node.args) > 1:
        return _opened(node.args[0], node.args[1])
    if last == "save" and isinstance(node.func, ast.Attribute) and node.args and call.name not in BY_NAME:
        picture = PICTURE.search(_end_of(context, call, node.args[0])) is not None
        return (node.args[0], "w") if picture and context.program.called(call) is None else (None, "")
    position, word = BY_NAME.get(call.name) or BY_LAST.get(last) or (-1, "")
    if last == "save_image" and position < 0 and context.program.called(call) is None:
        position, word = 1, "fp"
    if position < 0:
        return None, ""
    path = node.args[position] if len(node.args) > position else keyword(node, word)
    return path, "move" if call.name in MOVES else "w"


def _opened(path: ast.expr, mode: ast.expr | None) -> tuple[ast.expr | None, str]:
    text = str(mode.value) if isinstance(mode, ast.Constant) else ""
    return (path, text) if text[:1] in ("w", "a", "x") else (None, "")


def _end_of(context: Context, call: Call, node: ast.expr) -> str:
    """Return the text with which a path ends, as far as it is written in the function."""
    values = [node, *(a.value for a in context.program.assigned(call.function, dotted(node)) if a.value is not None)]
    for value in values:
        constants = [part for part in ast.walk(value) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        ends = [str(one.value) for one in constants if PICTURE.search(str(one.value))]
        if ends:
            return ends[-1]
    return ""


def by_all_ranks(context: Context, call: Call) -> bool:
    """Tell whether all ranks come to a call: nothing on one way to it, at least, may ask for the rank."""
    function = call.function
    if context.ranks.partial_place(function, call.place) or not undecided_by_rank(context, call):
        return False
    if isinstance(function.node, ast.Module) and not context.run_by_ranks(function):
        return False  # a program of one process, which has a function in common with the ranks
    return barriers_around(context, call) is None and all_callers(context, function, 0)


def undecided_by_rank(context: Context, call: Call, absent: bool = False, apart_from: ast.expr | None = None) -> bool:
    """Tell whether nothing around a call may be a decision by the rank: a flag such as `self.log`, a context.

    A test whether a file is there counts as one, but where `absent` is asked for.
    """
    if any(re.search(r"rank|main|master|first|zero|lock", ast.unparse(one).lower()) for one in call.place.withs):
        return False
    if any(part == "except" for _, part in call.place.tries):
        return False
    for guard in call.place.guards:
        text = ast.unparse(guard.test)
        if "__name__" in text or guard.test is apart_from or guard.early in ("raise", "exit"):
            continue
        if _is_of_one_process(guard):
            return False
        if EXISTS.search(text):
            parts = guard.test.values if absent and isinstance(guard.test, ast.BoolOp) else []
            others = [part for part in parts if not EXISTS.search(ast.unparse(part))]
            if absent and not any(may_be_of_rank(context, call.function, part, 0) for part in others):
                continue
            return False
        if may_be_of_rank(context, call.function, guard.test, 0):
            return False
    return True


def _is_of_one_process(guard: Guard) -> bool:
    """Tell whether a condition holds, by its words, in a program of one process only: the other half of `parallel`."""
    test, holds = guard.test, guard.holds
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if isinstance(test, ast.Compare) and is_constant(test.comparators[0], False):
        test, holds = test.left, not holds
    several = re.search(
        r"dist(?:ribut|_|\b)|parallel|multi_?(?:gpu|node|proc)|\bddp\b|initialized", ast.unparse(test), re.I
    )
    return not holds and not guard.early and several is not None and not isinstance(test, ast.BoolOp)


def may_be_of_rank(context: Context, function: Function, node: ast.expr, depth: int) -> bool:
    """Tell whether a condition may differ between the ranks for what it is called, or for what it is made of."""
    if isinstance(node, ast.BoolOp):
        if isinstance(node.op, ast.Or) and any(is_counted(value) for value in node.values):
            return False  # `step % 100 == 0 or early and rank == 0`: the first half is enough, on every rank
        return any(may_be_of_rank(context, function, value, depth) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return may_be_of_rank(context, function, node.operand, depth)
    if isinstance(node, ast.Compare):
        return any(may_be_of_rank(context, function, one, depth) for one in (node.left, *node.comparators))
    if isinstance(node, ast.Constant):
        return False
    text = ast.unparse(node)
    if CHOSEN.search(text) is None:
        return False
    name = dotted(node)
    if not name or OF_RANK.search(name) or depth > MAX_CALLERS:
        return True
    first = name.removeprefix("self.").partition(".")
    if first[1] and SETTINGS.fullmatch(first[0]):
        last = name.rpartition(".")[2]
        return context.says(
            function.module, re.compile(rf"\b{re.escape(last)}['\"]?\]?\s*=[^=\n]*(?:rank|main|master)")
        )
    if name in function.parameters and name not in function.assignments:
        sites = context.program.sites.get(id(function), ())
        given = [(site.function, argument(site, function, name) or default_of(function, name)) for site in sites]
        return not given or any(v is None or may_be_of_rank(context, where, v, depth + 1) for where, v in given)
    values = [a.value for a in context.program.assigned(function, name)]
    return not values or any(v is None or may_be_of_rank(context, function, v, depth + 1) for v in values)


def is_counted(node: ast.expr) -> bool:
    """Tell whether a condition is one of a counter, such as `step % 100 == 0`."""
    left = node.left if isinstance(node, ast.Compare) else None
    return isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and not OF_RANK.search(ast.unparse(node))


def all_callers(context: Context, function: Function, depth: int = 0) -> bool:
    """Tell whether all ranks call a function: over one way at least on which nothing may ask for the rank."""
    if depth > MAX_CALLERS or context.ranks.decorated(function):
        return False
    if is_started(context, function):
        return True
    if not made_by_all(context, function):
        return False
    sites = context.program.sites.get(id(function), ())
    if not sites:
        named = len(re.findall(rf"\b{re.escape(function.name)}\b", function.module.file.text)) > 1
        begins = isinstance(function.node, ast.Module) or named
        return begins and (context.run_by_ranks(function) or context.joins_group(function.module))
    return any(
        _is_of_all(context, site, sites)
        and site.function is not function
        and not any(starts_ranks(c) for c in site.function.calls)  # what starts the ranks is none
        and all_callers(context, site.function, depth + 1)
        for site in sites
    )


def _is_of_all(context: Context, site: Call, sites: Sequence[Call]) -> bool:
    """Tell whether all ranks come to a call, or to another one of the same function in the other branch."""
    found = context.ranks.partial(site)
    test = found[0].test if found is not None else None
    if found is not None and not any(
        guard.test is test and guard.holds is not found[0].holds and not guard.early
        for one in sites
        for guard in one.place.guards
    ):
        return False
    return undecided_by_rank(context, site, apart_from=test)


def made_by_all(context: Context, function: Function) -> bool:
    """Tell whether no condition of the rank stands where the object is made that a method is of."""
    made = function.of_class.methods.get("__init__") if function.of_class is not None else None
    if made is None or made is function:
        return True
    return not any(context.ranks.partial(site) for site in context.program.sites.get(id(made), ()))


CHANGED = r"(?:rank|gpu|time|now\b|date\b|stamp|getpid|uuid|random|hostname)"


def is_alike(context: Context, function: Function, node: ast.expr) -> bool:
    """Tell whether a value is made of constants, settings and counters only, and so is the same on all ranks."""
    return _Alike(context).value(function, node, 0)


class _Alike:
    """Looks for what a value is made of, over variables, attributes, callers and functions that return it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.begun: set[tuple[int, str]] = set()  # names that are looked at: `path = path + ".png"` adds only its rest

    def value(self, function: Function, node: ast.expr, depth: int) -> bool:
        if depth > MAX_DEPTH:
            return False

        def alike(*parts: ast.expr) -> bool:
            return all(self.value(function, one, depth + 1) for one in parts)

        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.JoinedStr):
            return alike(*(p.value for p in node.values if isinstance(p, ast.FormattedValue)))
        if isinstance(node, ast.BinOp):
            return alike(node.left, node.right)
        if isinstance(node, (ast.Tuple, ast.List)):
            return alike(*node.elts)
        if isinstance(node, ast.BoolOp):
            return alike(*node.values)
        if isinstance(node, ast.IfExp):
            return alike(node.body, node.orelse) and not OF_RANK.search(ast.unparse(node.test))
        if isinstance(node, ast.Starred):
            return alike(node.value)
        if isinstance(node, ast.Subscript):
            return self._part(function, node, depth)
        if isinstance(node, ast.Call):
            return self._call(function, node, depth)
        name = dotted(node)
        if name:
            return self._name(function, node, name, depth)
        return isinstance(node, ast.Attribute) and node.attr in SAME_PARTS and alike(node.value)

    def _part(self, function: Function, node: ast.Subscript, depth: int) -> bool:
        """Tell whether `config["name"]`, `names[epoch]`, `sys.argv[1]` or `path[:-4]` is the same on all ranks."""
        text = ast.unparse(node)
        if OWN.search(text):
            return False
        if text.startswith("sys.argv"):
            return True
        if isinstance(node.slice, ast.Slice):
            return self.value(function, node.value, depth + 1)
        root = re.split(r"[.\[]", text.removeprefix("self."))[0]
        if isinstance(node.slice, ast.Constant) and SETTINGS.fullmatch(root):
            changed = re.compile(rf"\[['\"]{re.escape(str(node.slice.value))}['\"]\]\s*\+?=[^=\n]*{CHANGED}")
            return not self.context.says(function.module, changed)
        return self.value(function, node.slice, depth + 1) and self.value(function, node.value, depth + 1)

    def _call(self, function: Function, node: ast.Call, depth: int) -> bool:
        made = function.module.full_name(node.func)
        if not all(self.value(function, one, depth + 1) for one in arguments_of(node)):
            return False
        if made in ("os.environ.get", "os.getenv"):
            return re.search(r"RANK|ID\b|GPU|HOST|NODE|TMP", ast.unparse(node)) is None
        if made in SAME:
            return True
        if isinstance(node.func, ast.Attribute) and node.func.attr in SAME_METHODS:
            return self.value(function, node.func.value, depth + 1)
        call = next((c for c in function.calls if c.node is node), None)
        target = self.context.program.called(call) if call is not None else None
        return target is not None and target.name != "__init__" and self._returned(target, depth)

    def _returned(self, target: Function, depth: int) -> bool:
        returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return) and e.node.value is not None]
        return bool(returned) and all(self.value(target, value, depth + 1) for value in returned)

    def _name(self, function: Function, node: ast.expr, name: str, depth: int) -> bool:
        first, _, rest = name.removeprefix("self.").partition(".")
        if rest and SETTINGS.fullmatch(first):
            changed = re.compile(rf"\.{re.escape(name.rpartition('.')[2])}\b\s*\+?=[^=\n]*{CHANGED}")
            return not OWN.search(name) and not self.context.says(function.module, changed)
        key = (id(function), name)
        if name == "__file__" or key in self.begun:
            return True
        if RANKS_OWN.search(name):
            return False
        self.begun.add(key)
        found = self._values(function, name, depth)
        if not found and COUNTER.fullmatch(name.rpartition(".")[2]):
            found = True
        if found is None:
            part = isinstance(node, ast.Attribute) and node.attr in SAME_PARTS
            found = part and self.value(function, node.value, depth + 1)  # type: ignore[attr-defined]
        self.begun.discard(key)
        return found

    def _values(self, function: Function, name: str, depth: int) -> bool | None:
        """Tell whether all that a variable may hold is the same on all ranks; None if nothing is known of it."""
        if name in function.parameters and name not in function.assignments:
            return self._given(function, name, depth)
        assigned = self.context.program.assigned(function, name)
        if assigned:
            return len(assigned) <= MANY and all(self._assigned(function, one, name, depth) for one in assigned)
        constant = self.context.program.constant(function.module, name)
        if constant is not None:
            return self.value(constant[0].body, constant[1], depth + 1)
        if name.startswith("self.") and name.count(".") == 1:
            return self._in_class(function, name.rpartition(".")[2], depth)
        return None

    def _in_class(self, function: Function, last: str, depth: int) -> bool | None:
        """Tell it of an attribute that the body of the class sets, or of a property."""
        for owner in self.context.program.with_bases(function):
            for statement in owner.node.body:
                if isinstance(statement, ast.Assign) and any(dotted(target) == last for target in statement.targets):
                    return self.value(function, statement.value, depth + 1)
            if last in owner.methods:
                return self._returned(owner.methods[last], depth)
        return None

    def _given(self, function: Function, name: str, depth: int) -> bool:
        """Tell whether all callers give what is the same on all ranks."""
        sites = self.context.program.sites.get(id(function), ())
        given = [(s.function, argument(s, function, name) or default_of(function, name)) for s in sites]
        default = default_of(function, name)
        if not given and default is not None:
            return not is_constant(default, None) and self.value(function, default, depth + 1)
        return 0 < len(given) <= MANY and all(
            value is not None and self.value(where, value, depth + 1) for where, value in given
        )

    def _assigned(self, function: Function, one: Assignment, name: str, depth: int) -> bool:
        if isinstance(one.node, (ast.With, ast.AsyncWith)):
            return False
        if one.value is not None:
            return self.value(function, one.value, depth + 1)
        if isinstance(one.node, (ast.For, ast.AsyncFor)):
            return self._turn(function, one.node, name, depth)
        value = getattr(one.node, "value", None)  # counted up, or unpacked
        return isinstance(value, ast.expr) and self.value(function, value, depth + 1)

    def _turn(self, function: Function, loop: ast.For | ast.AsyncFor, name: str, depth: int) -> bool:
        """Tell whether the variable of a loop has the same value on all ranks in each of its turns."""
        target, over = loop.target, loop.iter
        while isinstance(over, ast.Call) and last_of(over) in ("tqdm", "list") and over.args:
            over = over.args[0]
        if isinstance(over, ast.Call) and last_of(over) in ("range", "trange", "count"):
            return not any(OWN.search(one) for one in names_in(over))
        if isinstance(over, ast.Call) and last_of(over) == "enumerate" and over.args:
            counter = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
            return (counter is not None and dotted(counter) == name) or self.value(function, over.args[0], depth + 1)
        return self.value(function, over, depth + 1)
