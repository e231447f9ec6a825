"""Which ranks a condition lets through: `rank == 0`, `is_main_process()`, `self.is_master`, `writer is not None`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Literal

from .module import Assignment, Call, Function, Guard, Place, argument, dotted, is_constant, names_in, shown
from .program import Program

# first: rank 0 only, or the first of each node. others: all but that. some: a part, or not all of them each time.
Who = Literal["first", "others", "some"]

RANK = re.compile(
    r"(?:.*_)?rank|rank_(?:id|idx|index|num)|(?:local_|gpu_)id|gpu|process_(?:id|idx|index)|ddp_rank", re.IGNORECASE
)
NODE = re.compile(r"\bnr\s*\*\s*(?:\w+\.)?n?_?gpus")  # `rank = nr * gpus + gpu`: the number of a node
KEY = re.compile(r"(?:global_|local_|world_|ddp_)?rank")  # of a dict of settings: `config["global_rank"]`
NO_RANK = re.compile(r"(?:.*_)?(?:lora|low|matrix|tensor|svd|full|max|min|top|page)_?rank", re.IGNORECASE)
MACHINE = re.compile(r"\bnr\s*\*")  # the number of a node: `rank = args.nr * args.gpus + gpu`
NUMBER = re.compile(r"(?:global_|local_|world_|ddp_)?rank")  # 0 on the first: `if not args.rank`
FIRST = re.compile(
    r"(?:is_|on_)?(?:(?:local|global|world)_)?(?:main|master|rank_?(?:0|zero)|chief|primary|global_zero|(?:world|local)_process_zero)"
    r"(?:_(?:process|rank|proc|node|worker))?"
)
ONLY_FIRST = re.compile(
    r"rank_?(?:zero|0)(?:_only)?|(?:on_|run_on_)?(?:local_)?(?:main|master)(?:_process)?(?:_only)?"
    r"|(?:on|run_on)_rank_?(?:0|zero)|(?:main|master)(?:_process)?_only"
)
NOT_FIRST = {"main", "primary", "local_main", "local", "global"}  # by themselves, they are words for other things
RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"),
}
# A condition with such a word asks whether there are several processes at all.
ALONE = re.compile(
    r"distribut|initialized|available|world_?size|parallel|multi|ddp|n_?gpu|num_(?:processes|gpus)|debug"
)
NO_GPU = re.compile(r"not (?:\w+\.)*(?:use_)?cuda(?:\.is_available\(\))?")  # a program without GPUs has no ranks
# Names that say whether there are several processes, and how many.
SEVERAL = re.compile(
    r"(?:is_|use_|do_)?(?:distributed|ddp|multi_?gpu|multi_?node|dist_avail_and_initialized|initialized)"
)
COUNT = re.compile(r"(?:.*_)?world_?size|num_(?:processes|replicas|tasks|gpus)|n_?procs|n?_?gpus")
RANK_ZERO = ast.parse("rank == 0", mode="eval").body  # the condition of a decorator
INVERSE: dict[Who, Who] = {"first": "others", "others": "first", "some": "some"}


class Ranks:
    """Answers who gets past a condition, for all files of a program. What is not certain is None."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._who: dict[tuple[int, str], Who | None] = {}
        self._first_only: dict[tuple[int, str], bool] = {}
        self._made: dict[int, list[Call]] = {}
        self._guards: dict[tuple[int, bool, str], Who | None] = {}
        self._decorated: dict[int, bool] = {}
        self._alones: dict[tuple[int, bool], bool] = {}

    def guard(self, function: Function, guard: Guard) -> Who | None:
        """Return which ranks get past a guard, or None if all do or it is not known."""
        key = (id(guard.test), guard.holds, guard.early)
        if key not in self._guards:
            self._guards[key] = self._guard_now(function, guard)
        return self._guards[key]

    def _guard_now(self, function: Function, guard: Guard) -> Who | None:
        if guard.holds:
            return self.who(function, guard.test)
        if isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.Or):  # neither holds where one goes on
            sides = (self.who(function, value) for value in guard.test.values)
            return next((INVERSE[side] for side in sides if side), None)
        found = self.who(function, guard.test)
        if isinstance(guard.test, ast.BoolOp) and found is not None:
            rest = [v for v in guard.test.values if self.who(function, v) is None]
            only = len(guard.test.values) - len(rest) == 1 and rest  # the others hold wherever several ranks are
            if only and all(self._is_alone(function, value, False) for value in rest):
                return INVERSE[found]
            return None if any(ALONE.search(ast.unparse(value).lower()) for value in rest) else "some"
        return INVERSE[found] if found else None

    def partial(self, call: Call) -> tuple[Guard, Who] | None:
        """Return the outermost condition around a call that some ranks do not pass, and who passes it."""
        guards = call.place.guards
        if not guards and not self.decorated(call.function):
            return None
        if self.alone(call.function, guards) or call.function.name in ("__enter__", "__exit__"):  # one is half of it
            return None
        for guard in guards:
            if guard.early and any(
                guard.line < c.node.lineno and c.order < call.order for c in self._inits(call.function)
            ):
                continue  # whoever left before the group was made is not in it
            if guard.early and any(
                is_off(call.function, value.id)
                for value in getattr(guard.test, "values", ())
                if isinstance(value, ast.Name)
            ):
                continue  # who calls it has to ask for it, and knows what follows
            if (who := self.guard(call.function, guard)) is not None and not _never_taken(guard, guards):
                return None if self._excluded(call.function, guard, who, guards) else (guard, who)
        if self.decorated(call.function):
            line = call.function.node.decorator_list[0].lineno  # type: ignore[union-attr]
            return Guard(RANK_ZERO, True, line), "first"
        return None

    def _excluded(self, function: Function, guard: Guard, who: Who, guards: Sequence[Guard]) -> bool:
        """Tell whether another condition around a place lets only those ranks through that this one keeps out."""
        if who == "some" or len(guards) < 2:
            return False
        names = names_in(guard.test)
        return any(
            not other.early and self.guard(function, other) == INVERSE[who] and names & names_in(other.test)
            for other in guards
            if other is not guard
        )

    def partial_place(self, function: Function, place: Place) -> bool:
        """Tell whether only some ranks, or a program of one process, come to a place."""
        return self.alone(function, place.guards) or any(self.guard(function, guard) for guard in place.guards)

    def _inits(self, function: Function) -> list[Call]:
        if id(function) not in self._made:
            self._made[id(function)] = [c for c in function.calls if c.last == "init_process_group"]
        return self._made[id(function)]

    def alone(self, function: Function, guards: Sequence[Guard]) -> bool:
        """Tell whether conditions hold in a program of one process only: `local_rank == -1`, `not args.distributed`."""
        return any(self._is_alone(function, guard.test, guard.holds) for guard in guards)

    def _is_alone(self, function: Function, test: ast.expr, holds: bool) -> bool:
        key = (id(test), holds)
        if key not in self._alones:
            self._alones[key] = self._alone(function, test, holds)
        return self._alones[key]

    def _alone(self, function: Function, test: ast.expr, holds: bool) -> bool:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._alone(function, test.operand, not holds)
        if isinstance(test, ast.BoolOp):
            sides = [self._alone(function, value, holds) for value in test.values]
            return any(sides) if isinstance(test.op, ast.And) is holds else all(sides)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            op, right = type(test.ops[0]), ast.unparse(test.comparators[0])
            if isinstance(test.left, ast.Constant) and test.left.value in RANK_VARIABLES:  # no launcher has set it
                return right.endswith("environ") and op is (ast.NotIn if holds else ast.In)
            last = dotted(test.left.func if isinstance(test.left, ast.Call) else test.left).rpartition(".")[2]
            if COUNT.fullmatch(last):
                one = {("1", ast.Eq), ("1", ast.LtE), ("2", ast.Lt)}
                several = {("1", ast.NotEq), ("1", ast.Gt), ("2", ast.GtE)}
            elif self.is_rank(function, test.left):  # -1 stands for no rank at all
                one, several = {("-1", ast.Eq), ("0", ast.Lt)}, {("-1", ast.NotEq), ("-1", ast.Gt), ("0", ast.GtE)}
            else:
                return False
            return (right, op) in (one if holds else several)
        owner, _, last = dotted(test.func if isinstance(test, ast.Call) else test).rpartition(".")
        last = _key(test) or last
        built = last == "is_available" and owner.rpartition(".")[2] in ("dist", "distributed")
        return not holds and (built or bool(SEVERAL.fullmatch(last)))

    def decorated(self, function: Function) -> bool:
        """Tell whether a function has a decorator that lets rank 0 alone run it."""
        if id(function) not in self._decorated:
            self._decorated[id(function)] = self._decorated_now(function)
        return self._decorated[id(function)]

    def _decorated_now(self, function: Function) -> bool:
        if isinstance(function.node, ast.Module):
            return False
        for decorator in function.node.decorator_list:
            name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
            last = name.rpartition(".")[2]
            if ONLY_FIRST.fullmatch(last) and last not in NOT_FIRST:
                return True
        return False

    def who(self, function: Function, test: ast.expr, depth: int = 0) -> Who | None:
        """Return on which ranks `test` is true, where that differs between ranks."""
        if depth > 6:
            return None
        if isinstance(test, ast.BoolOp):
            return self._of_several(function, test, depth)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.who(function, test.operand, depth + 1)
            if inner is None and self._is_number_of_rank(function, test.operand):
                return "first"  # not get_rank(), not args.rank
            return INVERSE[inner] if inner and not isinstance(test.operand, ast.BoolOp) else inner and "some"
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._of_comparison(function, test, depth)
        if isinstance(test, ast.Call):
            return self._of_call(function, test, depth)
        if isinstance(test, ast.Subscript) and isinstance(test.slice, ast.Constant):
            return "first" if says_first(str(test.slice.value)) else None
        name = dotted(test)
        if not name:
            return "first" if isinstance(test, ast.Attribute) and says_first(test.attr) else None
        return self._of_name(function, name, depth)

    def _is_number_of_rank(self, function: Function, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return self.is_rank(function, node)
        return NUMBER.fullmatch(dotted(node).rpartition(".")[2]) is not None

    def _of_several(self, function: Function, test: ast.BoolOp, depth: int) -> Who | None:
        sides = [self.who(function, value, depth + 1) for value in test.values]
        if isinstance(test.op, ast.And):
            return next((side for wanted in ("first", "others", "some") for side in sides if side == wanted), None)
        found = {side for side in sides if side}
        rest = [value for value, side in zip(test.values, sides, strict=True) if side is None]
        if len(found) == 1 and all(
            ALONE.search(text := ast.unparse(value).lower())
            or NO_GPU.fullmatch(text)
            or self._alone(function, value, True)
            for value in rest
        ):
            return found.pop()
        return None

    def _of_comparison(self, function: Function, test: ast.Compare, depth: int) -> Who | None:
        op, left, right = test.ops[0], test.left, test.comparators[0]
        if isinstance(op, (ast.Is, ast.IsNot)) and is_constant(right, None):
            name = dotted(left)
            if name and self.first_only(function, name):
                return "first" if isinstance(op, ast.IsNot) else "others"
            return None
        if isinstance(op, (ast.Eq, ast.Is)) and is_constant(right, True):
            return self.who(function, left, depth + 1)
        if is_constant(left, 0) and isinstance(op, (ast.Eq, ast.NotEq)):
            left, right = right, left
        if not self.is_rank(function, left):
            return None
        if isinstance(op, (ast.In, ast.NotIn)):
            constants = [e.value for e in getattr(right, "elts", ()) if isinstance(e, ast.Constant)]
            return ("first" if isinstance(op, ast.In) else "others") if 0 in constants else None
        number = right.value if isinstance(right, ast.Constant) else None
        if number in (0, "0") and not isinstance(number, bool):
            found: dict[type[ast.cmpop], Who] = {
                ast.Eq: "first",
                ast.LtE: "first",
                ast.NotEq: "others",
                ast.Gt: "others",
            }
            return found.get(type(op))
        if number == 1 and isinstance(op, (ast.Lt, ast.GtE)):  # `self.rank < 1`: also without ranks, where it is -1
            return "first" if isinstance(op, ast.Lt) else "others"
        if isinstance(right, ast.Constant) and type(number) is int and number > 0:
            return "some"
        return "some" if isinstance(op, ast.Eq) and dotted(right).rpartition(".")[2] in ("src", "dst", "root") else None

    def _of_call(self, function: Function, test: ast.Call, depth: int) -> Who | None:
        name = dotted(test.func)
        if not name:
            attribute = test.func.attr if isinstance(test.func, ast.Attribute) else ""
            return "first" if says_first(attribute) else None
        if name in ("bool", "int") and len(test.args) == 1:
            return self.who(function, test.args[0], depth + 1)
        target = self.program.lookup(function.module, name)
        if isinstance(target, Function) and (found := self._of_returned(target, depth)) is not None:
            return found
        return "first" if says_first(name.rpartition(".")[2]) else None

    def _of_returned(self, target: Function, depth: int) -> Who | None:
        """Return the answer of a function of one line: `return get_rank() == 0`."""
        values = [exit.node.value for exit in target.exits if isinstance(exit.node, ast.Return) and exit.node.value]
        answers = {self.who(target, value, depth + 1) for value in values if not is_constant(value, True)}
        return answers.pop() if len(answers) == 1 else None

    def _of_name(self, function: Function, name: str, depth: int) -> Who | None:
        key = (id(function), name)
        if key not in self._who:
            self._who[key] = None  # for a name that is made from itself
            self._who[key] = self._of_name_now(function, name, depth)
        return self._who[key]

    def _of_name_now(self, function: Function, name: str, depth: int) -> Who | None:
        assigned = self.program.assigned(function, name)
        values = [a.value for a in assigned if not is_constant(a.value, True)]
        if values and all(value is not None for value in values):
            answers = {self.who(function, value, depth + 1) for value in values if value is not None}
            if len(answers) == 1 and (answer := answers.pop()) is not None:
                return answer
        if (flag := self._of_flag(function, assigned)) is not None:
            return flag
        if (flag := self._of_off_flag(function, assigned, depth)) is not None:
            return flag
        if len(assigned) == 1 and (part := self._of_unpacked(function, assigned[0], name, depth)) is not None:
            return part
        last = name.rpartition(".")[2]
        if name in function.parameters and is_off(function, name):
            return None  # a choice of the caller
        if says_first(last):
            return "first"
        return "first" if self.first_only(function, name) else None

    def _of_unpacked(self, function: Function, assignment: Assignment, name: str, depth: int) -> Who | None:
        """Return the answer of a part of what a function of these files returns: `is_first, device = setup()`."""
        value = getattr(assignment.node, "value", None)
        call = next((c for c in function.calls if c.node is value), None) if assignment.value is None else None
        target = self.program.called(call) if call is not None else None
        if target is None:
            return None
        for left in getattr(assignment.node, "targets", ()):
            names = [dotted(one) for one in left.elts] if isinstance(left, ast.Tuple) else []
            if name not in names:
                continue
            returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return)]
            parts = [v.elts for v in returned if isinstance(v, ast.Tuple) and len(v.elts) == len(names)]
            found = [elements[names.index(name)] for elements in parts]
            answers = {self.who(target, one, depth + 1) for one in found if not is_constant(one, True)}
            return answers.pop() if len(answers) == 1 else None
        return None

    def _of_flag(self, function: Function, assigned: Sequence[Assignment]) -> Who | None:
        """Return on which ranks a flag is true that has one value first, and another on some ranks."""
        if len(assigned) != 2 or not all(is_constant(a.value, True) or is_constant(a.value, False) for a in assigned):
            return None
        first, second = sorted(assigned, key=lambda a: a.order)
        sides = [self.guard(function, guard) for guard in second.place.guards]
        who = next((side for side in sides if side), None)
        if first.place.guards or who is None or is_constant(second.value, True) == is_constant(first.value, True):
            return None
        return who if is_constant(second.value, True) else INVERSE[who]

    def _of_off_flag(self, function: Function, assigned: Sequence[Assignment], depth: int) -> Who | None:
        """Return on which ranks a flag is true that is off at first, and that of the rank where there are several."""
        if len(assigned) != 2:
            return None
        first, second = sorted(assigned, key=lambda a: a.order)
        asks = all(g.holds and NO_GPU.fullmatch(f"not {ast.unparse(g.test).lower()}") for g in second.place.guards)
        if first.place.guards or not is_constant(first.value, False) or second.value is None or not asks:
            return None
        return self.who(function, second.value, depth + 1)

    def first_only(self, function: Function, name: str, depth: int = 0) -> bool:
        """Tell whether a variable holds an object on rank 0 and None on the others."""
        key = (id(function), name)
        if key not in self._first_only:
            self._first_only[key] = False
            self._first_only[key] = self._first_only_now(function, name, depth)
        return self._first_only[key]

    def _first_only_now(self, function: Function, name: str, depth: int) -> bool:
        if name in function.parameters:
            return self._given_first_only(function, name, depth)
        made = 0
        nothing = 0
        for assignment in self.program.assigned(function, name):
            value = assignment.value
            if isinstance(value, ast.IfExp) and is_constant(value.orelse, None):
                if self.who(function, value.test) != "first":
                    return False
                made, nothing = made + 1, nothing + 1
            elif is_constant(value, None):
                nothing += 1
            elif value is not None and any(self.guard(function, g) == "first" for g in assignment.place.guards):
                made += 1
            else:
                return False
        return made > 0 and nothing > 0

    def _given_first_only(self, function: Function, name: str, depth: int) -> bool:
        """Tell whether every call that is known gives such an object for a parameter."""
        sites = self.program.sites.get(id(function), ())
        if depth > 3 or not sites:
            return False
        for call in sites:
            value = argument(call, function, name)
            given = dotted(value) if value is not None else ""
            if isinstance(value, ast.IfExp) and is_constant(value.orelse, None):
                if self.who(call.function, value.test) != "first":
                    return False
            elif not given or not self.first_only(call.function, given, depth + 1):
                return False
        return True

    def is_rank(self, function: Function, node: ast.expr, depth: int = 0) -> bool:
        """Tell whether an expression is a rank."""
        if depth > 4:
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # rank % gpus_per_node
            node = node.left
        if isinstance(node, ast.Call) and dotted(node.func) in ("int", "str") and node.args:
            node = node.args[0]
        if isinstance(node, ast.Call) and node.args and dotted(node.func) in ("os.environ.get", "os.getenv", "getenv"):
            return isinstance(node.args[0], ast.Constant) and node.args[0].value in RANK_VARIABLES
        if isinstance(node, ast.Subscript):
            key = str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
            return key in RANK_VARIABLES or KEY.fullmatch(key) is not None
        name = dotted(node.func if isinstance(node, ast.Call) else node)
        last = name.rpartition(".")[2] if name else getattr(node, "attr", "")
        if RANK.fullmatch(last) and not NO_RANK.fullmatch(last):
            return True
        if last == "nr" and MACHINE.search(function.module.file.text):
            return True
        if name and isinstance(node, (ast.Name, ast.Attribute)):
            values = [a.value for a in self.program.assigned(function, name)]
            known = [value for value in values if value is not None and not isinstance(value, ast.Constant)]
            return bool(known) and all(self.is_rank(function, value, depth + 1) for value in known)
        return False

    def words(self, guard: Guard, who: Who) -> str:
        """Return which ranks pass a guard, in words: `only rank 0`."""
        test = shown(guard.test, 50)
        local = "local" in test.lower()
        if re.search(r"\bnr\b", test):
            return "only the ranks of the first node" if who == "first" else "every rank but those of the first node"
        if who == "first":
            return "only the first rank of each node" if local else "only rank 0"
        if who == "others":
            return "every rank but the first of each node" if local else "every rank but rank 0"
        return f"not every rank (it depends on `{test}`)"


def _key(test: ast.expr) -> str:
    """Return `distributed` for `args["distributed"]` and `args.get("distributed")`."""
    key = test.slice if isinstance(test, ast.Subscript) else None
    if isinstance(test, ast.Call) and test.args and isinstance(test.func, ast.Attribute) and test.func.attr == "get":
        key = test.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _never_taken(guard: Guard, guards: Sequence[Guard]) -> bool:
    """Tell whether an early exit under `a and b` cannot have been taken where another condition is `not a`."""
    if not (guard.early and isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.And)):
        return False
    wanted = {_plain(value, True) for value in guard.test.values}
    held = [_plain(one.test, one.holds) for one in guards if one is not guard and not isinstance(one.test, ast.BoolOp)]
    return any((text, not holds) in wanted for text, holds in held)


def _plain(test: ast.expr, holds: bool) -> tuple[str, bool]:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    return ast.unparse(test), holds


def is_off(function: Function, name: str) -> bool:
    """Tell whether a parameter is False unless it is given."""
    if isinstance(function.node, ast.Module):
        return False
    given = function.node.args
    ordered = [*given.posonlyargs, *given.args]
    pairs = [*zip(reversed(ordered), reversed(given.defaults), strict=False)]
    pairs += [(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    return any(one.arg == name and is_constant(default, False) for one, default in pairs)


def says_first(name: str) -> bool:
    """Tell whether a name says that it is true on rank 0: `is_main_process`, `master_process`, `is_global_zero`."""
    return bool(FIRST.fullmatch(name)) and name not in NOT_FIRST
