"""Rules for wrong results in a step: gradients that are not reduced, or reduced wrongly, and weights that differ."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .context import Context, Found
from .module import Call, Function, dotted, dotted_names, names_in, shown, variable_of
from .ranks import COUNT


def steps_of_some(context: Context, function: Function) -> Iterator[Found]:
    """Yield steps of an optimizer or a scheduler that only some ranks make: learning rates or weights drift apart."""
    if not context.plain(function.module):
        return
    for call in function.calls:
        owner = dotted(call.node.func).rpartition(".")[0].lower()
        if call.last != "step" or not re.search(r"optim|sched|^opt$", owner) or not call.place.guards:
            continue
        found = context.ranks.partial(call)
        if found is None or found[0].early or not context.run_by_ranks(function):
            continue
        others = (c for c in function.calls if c is not call and dotted(c.node.func) == dotted(call.node.func))
        if any(any(g.test is found[0].test and g.holds != found[0].holds for g in c.place.guards) for c in others):
            continue
        what = "learning rates of the ranks differ" if "sched" in owner else "weights of the ranks differ"
        ranks = "some ranks" if found[1] == "some" else context.ranks.words(*found)
        message = f"`{shown(call.node.func)}` runs on {ranks}: from then on the {what}"
        fix = f"call `{shown(call.node.func)}` on every rank, outside of `if {shown(found[0].test, 40)}`"
        yield Found("DDP222", function.module, call.node, message, fix)


def past_ddp(context: Context, function: Function) -> Iterator[Found]:
    """Yield a loss that is computed past DDP, so that no gradient of it is reduced."""
    if not context.plain(function.module):
        return
    backward = {dotted(c.node.func).rpartition(".")[0] for c in function.calls if c.last == "backward"}
    backward |= {n for c in function.calls if c.last == "scale" for a in c.node.args[:1] for n in [dotted(a)] if n}
    if not backward - {""}:
        return
    forwards = [c for c in function.calls if (e := context.effects.direct(c)) is not None and e.kind == "forward"]
    for call in function.calls:
        text = dotted(call.node.func)
        owner, _, rest = text.partition(".module")
        past = bool(rest or text.endswith(".module")) and (not rest or rest.startswith(".")) and bool(call.node.args)
        inner = not past and _wrapped_name(context, function, call) is not None
        if not (past or inner) or rest.rpartition(".")[2] in QUIET or any(_no_grad(w) for w in call.place.withs):
            continue
        wrapper = owner if past else _wrapped_name(context, function, call)
        if past and not (context.effects.is_ddp(function, owner)):
            continue
        loops = call.place.loops[-1:]
        if any(loops == f.place.loops[-1:] for f in forwards) or not _leads_to(function, call, backward):
            continue
        message = (
            f"this loss does not go through `{wrapper}`, the model in DDP, so backward reduces no gradient: each rank"
            " trains weights of its own, and the ranks drift apart in silence"
        )
        fix = f"compute it with `{wrapper}(...)`; put what `{shown(call.node.func)}` does into the model's forward"
        yield Found("DDP204", function.module, call.node, message, fix)


QUIET = {"parameters", "state_dict", "eval", "train", "load_state_dict", "named_parameters", "modules", "zero_grad"}


def _no_grad(context_expression: ast.expr) -> bool:
    return any(name in ("no_grad", "inference_mode") for name in names_in(context_expression))


def _wrapped_name(context: Context, function: Function, call: Call) -> str | None:
    """Return `ddp_model` where a call is of `model` and the function says `ddp_model = DDP(model)` before."""
    text = dotted(call.node.func)
    if not text or not call.node.args:
        return None
    for name, assigned in function.assignments.items():
        for assignment in assigned:
            wrap = context.effects.wrap_of(function, assignment)
            if wrap is None or name == text or not wrap.args or assignment.order > call.order:
                continue
            if dotted(wrap.args[0]) == text and not assignment.place.guards and call.place.loops:
                return name
    return None


def _leads_to(function: Function, call: Call, backward: set[str]) -> bool:
    """Tell whether the result of a call gets, at once or over other names, into a loss of which backward is called."""
    names: set[str] = set()
    for _ in range(4):
        for name, assigned in function.assignments.items():
            for assignment in assigned:
                value = assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)
                if value is None or assignment.place.loops[-1:] != call.place.loops[-1:]:
                    continue
                if any(part is call.node for part in ast.walk(value)) or names & names_in(value):
                    names.add(name)
        if names & backward:
            return True
    return False


def reduced_losses(context: Context, function: Function) -> Iterator[Found]:
    """Yield a loss that is averaged over the ranks before backward: its gradient is divided once more by DDP.

    all_reduce changes the value in place and is not recorded by autograd; the division by the number of ranks is.
    """
    if not context.plain(function.module):
        return
    backward = {dotted(c.node.func).rpartition(".")[0] for c in function.calls if c.last == "backward"}
    backward |= {n for c in function.calls if c.last == "scale" for a in c.node.args[:1] for n in [dotted(a)] if n}
    backward -= {""}
    for call in function.calls if backward else ():
        if call.name == "torch.distributed.all_reduce" and call.node.args:
            name = dotted(call.node.args[0])
            reduced = name if name and _divided(function, name, call) else ""
        else:
            reduced = _averaged_by(context, function, call)
        if reduced and _reaches(function, reduced, backward, call):
            message = (
                f"`{reduced}` is divided by the number of ranks and then goes into backward, where DDP averages the"
                " gradients itself: the gradient of this part is too small by the number of ranks"
            )
            fix = f"reduce a copy for the log, `{reduced}.detach().clone()`, and leave `{reduced}` to backward as it is"
            yield Found("DDP214", function.module, call.node, message, fix)


def own_gradient(context: Context, function: Function) -> Iterator[Found]:
    """Yield a gather of torch.autograd.Function whose backward pass takes this rank's part of this rank's gradient."""
    owner = function.of_class
    if function.name != "backward" or owner is None or not any(base.endswith("Function") for base in owner.bases):
        return
    forward = owner.methods.get("forward")
    gathers = [c for c in forward.calls if c.name.startswith("torch.distributed.all_gather")] if forward else []
    if not gathers or any(context.effects.of(c) for c in function.calls) or not context.plain(function.module):
        return
    parts = [part for part in ast.walk(function.node) if isinstance(part, ast.Subscript)]
    own = next((part for part in parts if "rank" in ast.unparse(part.slice)), None)
    if own is not None:
        message = (
            f"`{shown(own, 40)}` is this rank's own loss's gradient for its own part: what the other ranks' losses say"
            " about this part is dropped, and DDP divides the rest by the number of ranks"
        )
        fix = (
            "sum the gradients over the ranks first (`all_reduce` in backward), or use torch.distributed.nn.functional"
        )
        yield Found("DDP622", function.module, own, message, fix)


def _divided(function: Function, name: str, call: Call) -> bool:
    """Tell whether a tensor, and not its data, is divided by the number of ranks behind a call."""
    for other in function.calls:
        text = dotted(other.node.func)
        if text == f"{name}.div_" and other.order > call.order and any(_counts(a) for a in other.node.args[:1]):
            return True
    for assignment in function.assignments.get(name, ()):
        statement = assignment.node
        if assignment.order < call.order or assignment.place.loops != call.place.loops:
            continue
        if isinstance(statement, ast.AugAssign):
            return isinstance(statement.op, ast.Div) and _counts(statement.value)
        return assignment.value is not None and _divides(assignment.value, name)
    return False


def _divides(value: ast.expr, name: str) -> bool:
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Div)
        and dotted(part.left) == name
        and _counts(part.right)
        for part in ast.walk(value)
    )


def _counts(node: ast.expr) -> bool:
    """Tell whether an expression is the number of ranks."""
    return any(COUNT.fullmatch(name) or name in ("get_world_size", "word_size") for name in names_in(node))


def _averaged_by(context: Context, function: Function, call: Call) -> str:
    """Return the name that gets what a helper returns which averages its argument over the ranks, with gradients."""
    target = context.program.called(call)
    if target is None or not call.node.args or not (name := variable_of(function, call)):
        return ""
    if any(no_gradients in ast.unparse(target.node) for no_gradients in ("detach", ".data", "no_grad", ".item")):
        return ""
    made = {dotted(c.node.args[0]) for c in target.calls if c.name == "torch.distributed.all_reduce" and c.node.args}
    own = set(target.parameters[:1]) | {
        assigned.target
        for found in target.assignments.values()
        for assigned in found
        if isinstance(assigned.value, ast.Call) and dotted(assigned.value.func) == f"{target.parameters[0]}.clone"
    }
    for reduce in target.calls:
        if reduce.name == "torch.distributed.all_reduce" and (one := dotted(reduce.node.args[0])) in own & made:
            returned = [e.node.value for e in target.exits if isinstance(e.node, ast.Return) and e.node.value]
            if _divided(target, one, reduce) and any(dotted(value) == one for value in returned):
                return name
            if any(_divides(value, one) for value in returned):
                return name
    return ""


def _reaches(function: Function, name: str, backward: set[str], call: Call) -> bool:
    """Tell whether a value gets into a loss of which backward is called behind a call, with its gradient."""
    names, order = {name}, call.order
    if name in backward and any(
        c.order > order for c in function.calls if c.last in ("backward", "scale") and name in names_in(c.node)
    ):
        return not _made_anew(function, name, order)
    found = [a for assigned in function.assignments.values() for a in assigned if a.order > order]
    for assignment in sorted(found, key=lambda a: a.order):
        value = assignment.value if assignment.value is not None else getattr(assignment.node, "value", None)
        if value is None or assignment.place.loops != call.place.loops or QUIETED & names_in(value):
            continue
        if names & dotted_names(value) and not isinstance(value, ast.Call):
            names.add(assignment.target)
    return bool((names - {name}) & backward)


def _made_anew(function: Function, name: str, order: int) -> bool:
    return any(
        a.order > order and a.value is not None and name not in names_in(a.value)
        for a in function.assignments.get(name, ())
    )


QUIETED = {"detach", "item", "data", "no_grad", "cpu", "numpy"}


def no_sync(context: Context, function: Function) -> Iterator[Found]:
    """Yield no_sync() around a step of the optimizer, and around backward without its forward pass."""
    blocks: dict[int, tuple[ast.expr, list[Call]]] = {}
    for call in function.calls:
        for entered in call.place.withs:
            if isinstance(entered, ast.Call) and getattr(entered.func, "attr", "") == "no_sync" and not entered.args:
                blocks.setdefault(id(entered), (entered, []))[1].append(call)
    for entered, calls in blocks.values():
        owner = (
            dotted(entered.func.value)
            if isinstance(entered, ast.Call) and isinstance(entered.func, ast.Attribute)
            else ""
        )
        step = next((c for c in calls if c.last == "step" and _is_optimizer(context, c)), None)
        if step is not None and not any(guard.test for guard in step.place.guards[-1:]):
            message = (
                "inside of no_sync() gradients are not reduced, so this step applies each rank's own gradients,"
                " and the weights of the ranks drift apart"
            )
            fix = f"run the last backward and `{shown(step.node.func)}` behind `with {shown(entered)}`, not in it"
            yield Found("DDP213", function.module, step.node, message, fix)
            continue
        backward = next((c for c in calls if c.last == "backward"), None)
        forward_inside = any(dotted(c.node.func) in (owner, f"{owner}.forward") for c in calls)
        before = [c for c in function.calls if dotted(c.node.func) == owner and backward and c.order < backward.order]
        if backward is not None and before and not forward_inside and len(calls) <= 2:
            message = "DDP decides in the forward pass whether to reduce: this backward reduces in spite of no_sync()"
            fix = f"put the call of `{owner}` into `with {shown(entered)}` as well"
            yield Found("DDP409", function.module, backward.node, message, fix)


def _is_optimizer(context: Context, call: Call) -> bool:
    return bool(re.search(r"optim|^opt$|scaler", dotted(call.node.func).rpartition(".")[0].lower()))


RULES = (no_sync,)
OF_RANKS = (steps_of_some, past_ddp, reduced_losses, own_gradient)
