"""All rules on scripts, environment files and the variables that other files set."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..files import SourceFile
from ..findings import Finding
from ..variables import Project, Releases, Setting, judge, load_table, release
from .documents import in_document
from .ends import SETTING, ending_rules, syntax_rules
from .launch import read_job
from .reader import Assignment, Script, read_script, read_settings
from .rules import finding
from .starts import EPHEMERAL, starting_rules

# Google's settings for the network of A3 machines: they choose NCCL's algorithm and protocol for that hardware.
VENDOR = re.compile(r"NCCL_FASTRAK_|NCCL_GPUDIRECTTCPX_")
CHOSEN = ("DDP250", "DDP657")
TEST = re.compile(r"(?:^|/)(?:tests/|test_[^/]*$|[^/]*_test\.py$|conftest\.py$)")  # they have faults on purpose
OF_GROUPS = ("DDP660", "DDP556")
MAKES_GROUP = re.compile(r"init_process_group|deepspeed|DistributedDataParallel|Trainer\(|Accelerator\(|Fabric\(|FSDP")
READ = re.compile(r"(?:environ(?:\.get|\.pop)?|getenv)\s*[\[(]\s*[\"']([A-Z][A-Z0-9_]+)[\"']\s*[\]),](?!\s*=[^=])")
PINNED = re.compile(r"[\"']torch\s*((?:[=<>~!]=?\s*[\d.]+(?:\+\w+)?[\s,]*)+)[\"';]")
NAMED = re.compile(rf"[\"'](?:{SETTING})[\"']|\bupdate\(")
NAME_AND_VALUE = re.compile(
    r"^(\s*(?:-\s+)?)name:\s*[\"']?([A-Z]\w+)[\"']?\s*\n\s*value:\s*[\"']?([^\"'\n#]*)", re.MULTILINE
)
MAPPED = re.compile(r"^(\s*(?:-\s+)?)([A-Z][A-Z0-9_]+)\s*[:=]\s*[\"']?([^\"'\n#]*?)[\"']?\s*(?:#.*)?$", re.MULTILINE)
SETS = re.compile(r"environ|putenv|update")
CI = re.compile(r"(?:.*/)?(?:\.github|\.circleci|\.gitlab-ci|\.buildkite)\b")  # tests: they may be slow, and are short
ADDRESS = re.compile(  # of this node only: with other hosts a user has to change it anyway
    r"[\"']tcp://(?:localhost|127\.0\.0\.1):(?:(\d{2,5})[\"'](?!\s*\+)|\{?(?:np\.)?random\.\w+\([^\"'\n]*"
    r"|\d*[\"']\s*\+\s*str\(\s*(?:np\.)?random\.)"
)
ADDRESS_OF_SETTINGS = re.compile(
    r"^[ \t]*[\"']?(?:\w*dist_?url|\w*init_method|(?:\w*master|\w*main_process|dist|distributed|ddp)_?port)[\"']?"
    r"\s*[:=]\s*[\"']?(?:tcp://(?:localhost|127\.0\.0\.1|0\.0\.0\.0):)?(\d{4,5})\b",
    re.MULTILINE | re.IGNORECASE,
)
# A file of settings in Python, of mmcv and its like, which a program reads by its path, and what it does with a port.
IN_SETTINGS = re.compile(r"(?:^|/)(?:configs?|cfgs?|settings)/")
PORT_OF_SETTINGS = re.compile(r"^(?:dist_|master_)?port[ \t]*=[ \t]*(\d{4,5})[ \t]*(?:#.*)?$", re.MULTILINE)
DEFINES = re.compile(r"^(?:def|class) ", re.MULTILINE)
MEETS_AT_SETTING = re.compile(r"tcp://(?:localhost|127\.0\.0\.1|0\.0\.0\.0):\{\w+\.(?:dist_|master_)?port\}")
GROUPS = re.compile(
    r"init_process_group|mp\.spawn|torch\.multiprocessing|multiprocessing\.spawn|tcp://|torch\.distributed"
)
PORT_OPTION = re.compile(r"add_argument\([^()]*[\"']--(?:\w+[-_])?port[\"'][^()]*\bdefault\s*=\s*[\"']?(\d{4,5})\b")
PORT_CONSTANT = re.compile(  # a constant that is given to MASTER_PORT further down
    r"^(?P<name>\w*PORT)\s*=\s*[\"']?(?P<port>\d{4,5})\b(?=[\s\S]*?MASTER_PORT[\"']\s*(?:\]\s*=|,)\s*(?:str\()?(?P=name)\b)",
    re.MULTILINE,
)
PORT_VARIABLE = re.compile(
    r"environ(?:\.setdefault\(\s*|\s*\[\s*)[\"']MASTER_PORT[\"']\s*(?:\]\s*=|,)\s*(?:str\()?[\"']?(\d{2,5})\b"
)
REQUEUES = re.compile(
    r"(?:os\.system|subprocess\.\w+)\([^\n]*\bscontrol\W+requeue"
    r"|\b(?P<name>\w+)\s*=\s*f?[\"']scontrol requeue[^\n]*"
    r"(?=[\s\S]{0,300}?(?:os\.system|subprocess\.\w+)\(\s*(?P=name)\b)"
)
COUNTED = re.compile(r"RESTART_COUNT|max_(?:requeue|restart|retr)|requeues|num_requeue", re.IGNORECASE)
GROUP_IS_MADE_WITH = re.compile(r"TORCH_NCCL_|TORCH_FR_|MASTER_(?:ADDR|PORT)$|TORCH_DISTRIBUTED_DEBUG$")


def check_scripts(files: Sequence[SourceFile], project: Project | None = None) -> list[Finding]:
    """Return what is wrong with the scripts and the variables of a repository, or of a part of that `project`."""
    project = project_of(files) if project is None else project
    found: list[Finding] = []
    for file in files:
        if file.kind == "markdown":
            found += in_document(file, project)
        if CI.match(file.inside) or (file.kind == "python" and TEST.search(file.inside)):
            continue
        if file.kind == "shell":
            found += _script(file, project)
        elif file.kind == "env":
            script = read_settings(file.path, file.text)
            found += judge(_settings(script.assignments, script.path), project)
        elif file.kind == "python" and _sets_variables(file.text):
            found += _python(file, project)
        if file.kind == "python":
            found += _in_python(file, files)
        if file.path in project.ports:
            found += _in_settings(file, project.ports[file.path])
        if file.kind in ("docker", "yaml") and re.search(r"NCCL_|GLOO_|TORCH|CUDA_LAUNCH|MASTER_", file.text):
            found += judge(list(_listed(file)), project)
    texts = {file.path: file.text for file in files if VENDOR.search(file.text)}
    return sorted({one for one in found if not (one.rule in CHOSEN and one.file in texts)})


def project_of(files: Sequence[SourceFile]) -> Project:
    """What the repository says about its torch, and which variables its own code reads."""
    read: set[str] = set()
    python, rpc = False, False
    releases = Releases()
    for file in files:
        if file.kind == "python":
            python = True
            if "environ" in file.text or "getenv" in file.text:
                read.update(READ.findall(file.text))
            rpc = rpc or "distributed.rpc" in file.text or "import rpc" in file.text or "tensorpipe" in file.text
        elif file.kind == "toml" and file.inside.endswith("pyproject.toml") and (match := PINNED.search(file.text)):
            releases = _releases(match.group(1))
    return Project(
        releases, frozenset(read), rpc or not python, frozenset(file.inside for file in files), _first_ports(files)
    )


def _first_ports(files: Sequence[SourceFile]) -> dict[str, int]:
    """Return, for each folder of the repository, the first file of settings with a port, and how many others have one.

    A hundred settings that are alike say the same hundred times.
    """
    found: dict[str, list[str]] = {}
    python = [file for file in files if file.kind == "python"]
    by_path = any(".fromfile(" in file.text and MEETS_AT_SETTING.search(file.text) for file in python)
    for file in files:
        of_settings = file.kind in ("yaml", "json", "toml") and not TEST.search(file.inside)
        given = of_settings and ADDRESS_OF_SETTINGS.search(file.text)
        if given or (by_path and _is_settings(file) and PORT_OF_SETTINGS.search(file.text)):
            folder, slash, _ = file.inside.partition("/")
            found.setdefault(folder if slash else "", []).append(file.path)
    return {paths[0]: len(paths) - 1 for paths in found.values()}


def _is_settings(file: SourceFile) -> bool:
    """Tell whether a file of Python is one of settings: it lies among them, and defines nothing."""
    return file.kind == "python" and IN_SETTINGS.search(file.inside) is not None and not DEFINES.search(file.text)


def _releases(text: str) -> Releases:
    """`>=2.4,<2.9` as its bounds."""
    least: tuple[int, ...] | None = None
    most: tuple[int, ...] | None = None
    for sign, number in re.findall(r"([=<>~!]=?)\s*([\d.]+)", text):
        value = release(number)
        if sign in ("==", "~=", ">=", ">"):
            least = value
        if sign == "==" or sign == "<=":
            most = value
        elif sign == "<" and len(value) >= 2 and value[1] > 0:
            most = (value[0], value[1] - 1)
    return Releases(least, most)


def _script(file: SourceFile, project: Project) -> list[Finding]:
    script = read_script(file.path, file.text)
    job = read_job(script)
    project = replace(project, read=project.read | _read_by(script))
    found = [*starting_rules(job), *ending_rules(job), *syntax_rules(script)]
    reach = [one for one in script.assignments if one.scope != "shell"]
    always = [one for one in reach if one.scope == "exported" and not one.conditional]
    found += judge(_settings(always, script.path), project, several_nodes=job.several_nodes)
    for one in reach:
        if one not in always:
            found += judge(_settings([one], script.path), project, several_nodes=job.several_nodes)
    if job.launches and all(one.program == "python" and not one.starter for one in job.launches):
        found = [one for one in found if one.rule not in OF_GROUPS]  # one process, as far as can be seen
    return found


def _read_by(script: Script) -> set[str]:
    """The variables that a script itself uses: `timeout $NCCL_TIMEOUT make test`, but not `A=${A:-1}` or `echo $A`."""
    names: set[str] = set()
    for command in script.commands:
        if command.name in ("echo", "printf", "export", "env") or not command.words:
            continue
        for word in command.words:
            names.update(re.findall(r"\$\{?([A-Z]\w+)", word.raw))
    for one in script.assignments:
        names.update(name for name in re.findall(r"\$\{?([A-Z]\w+)", one.value.raw) if name != one.name)
    return names


def _settings(assignments: Sequence[Assignment], path: str) -> list[Setting]:
    return [Setting(one.name, one.literal, path, one.line, one.column) for one in assignments]


def _listed(file: SourceFile) -> Iterator[Setting]:
    """`ENV NAME=value` of a Dockerfile; `name: NAME` and `value: x`, or `NAME: x`, in YAML. Only names of the table."""
    known = load_table().variables
    if file.kind == "docker":
        for number, line in enumerate(file.text.splitlines(), 1):
            if re.match(r"\s*(?:ENV\s+)?(?:[A-Z]\w*=|[A-Z]\w*\s)", line):
                for match in re.finditer(r"\b([A-Z][A-Z0-9_]+)=(\"[^\"]*\"|\S*)", line):
                    if match.group(1) in known:
                        yield Setting(match.group(1), _plain(match.group(2)), file.path, number, match.start() + 1)
        return
    for pattern in (NAME_AND_VALUE, MAPPED):
        for match in pattern.finditer(file.text):
            if match.group(2) in known:
                start = match.start(2)
                row = file.text.count("\n", 0, start) + 1
                column = start - file.text.rfind("\n", 0, start)
                yield Setting(match.group(2), _plain(match.group(3)), file.path, row, column)


def _plain(text: str) -> str | None:
    """The value; None where a template or a variable decides."""
    value = text.strip().strip("\"'")
    return None if re.search(r"[${}]|<.*>", value) else value


def _sets_variables(text: str) -> bool:
    """Whether a file is worth parsing."""
    return ("environ" in text or "putenv" in text) and NAMED.search(text) is not None


def _python(file: SourceFile, project: Project) -> list[Finding]:
    """`os.environ["NAME"] = "value"` and its like."""
    try:
        tree = file.tree
    except (SyntaxError, ValueError, RecursionError):
        return []
    settings = list(_environ(tree, file.text, file.path))
    found = judge([one for one in settings if one.name != "TP_SOCKET_IFNAME" or not project.uses_rpc], project)
    if re.search(r"cuda_?graph", file.text, re.IGNORECASE):  # PyTorch's notes on CUDA graphs with DDP ask for it
        found = [one for one in found if one.rule != "DDP661"]
    if not MAKES_GROUP.search(file.text):  # for which the variable is meant is not known
        found = [one for one in found if one.rule not in OF_GROUPS]
    return found + (list(_too_late(tree, file.path)) if "init_process_group" in file.text else [])


def _in_python(file: SourceFile, files: Sequence[SourceFile]) -> Iterator[Finding]:
    """Ports that a program writes down in an address of its group, and a job that it hands in again."""
    if "init_process_group" in file.text or "dist" in file.text:
        for match in ADDRESS.finditer(file.text):
            where = _place_of(file, match.start())
            port = match.group(1)
            if not port:
                message = "The port is drawn without a look whether it is free: rank 0 may find it taken."
                yield finding(
                    "DDP652", where, message, "Let the system choose one: bind port 0 on rank 0, and pass it on."
                )
            else:
                yield _fixed_port(port, where)
    for pattern in (PORT_OPTION, PORT_VARIABLE, PORT_CONSTANT) if GROUPS.search(file.text) else ():
        for match in pattern.finditer(file.text):
            yield _fixed_port(match.groups()[-1], _place_of(file, match.start()))
    for match in REQUEUES.finditer(file.text) if "scontrol" in file.text else ():
        if not COUNTED.search(file.text) and _is_used(file, match.start(), files):
            message = "The job requeues itself and counts nothing: one that fails at once does so for ever."
            fix = "Count the attempts (SLURM_RESTART_COUNT), and stop at a bound."
            yield finding("DDP353", _place_of(file, match.start()), message, fix)


def _in_settings(file: SourceFile, others: int) -> Iterator[Finding]:
    """Ports that are written down in the settings of a program, here and in `others`."""
    for match in (PORT_OF_SETTINGS if file.kind == "python" else ADDRESS_OF_SETTINGS).finditer(file.text):
        found = _fixed_port(match.group(1), _place_of(file, match.start(1)))
        also = f" ({others} other file{'s' * (others > 1)} of settings beside it: alike.)" if others else ""
        yield replace(found, message=found.message + also)


def _fixed_port(port: str, where: tuple[str, int, int]) -> Finding:
    """Return what a port that is written down leads to."""
    if int(port) in EPHEMERAL:
        message = f"Port {port} is one that Linux gives to any outgoing connection: rank 0 may find it taken."
        return finding("DDP652", where, message, "Use torchrun --standalone on one node, or a port below 32768.")
    message = f"Port {port} is fixed: a second job on the node of rank 0 finds it taken, or joins the wrong job."
    return finding("DDP651", where, message, "Use torchrun --standalone on one node, or make it from the job.")


def _is_used(file: SourceFile, start: int, files: Sequence[SourceFile]) -> bool:
    """Whether the function in which something stands is named elsewhere."""
    defined = list(re.finditer(r"^[ \t]*def (\w+)", file.text[:start], re.MULTILINE))
    if not defined:
        return True
    name = re.compile(rf"\b{defined[-1][1]}\b")
    others = (other for other in files if other is not file and other.kind == "python")
    return len(name.findall(file.text)) > 1 or any(name.search(other.text) for other in others)


def _place_of(file: SourceFile, start: int) -> tuple[str, int, int]:
    line = file.text.count("\n", 0, start) + 1
    return file.path, line, start - file.text.rfind("\n", 0, start)


def _environ(tree: ast.Module, text: str, path: str) -> Iterator[Setting]:
    lines = [number for number, line in enumerate(text.split("\n"), 1) if SETS.search(line)]
    for node in _around(tree.body, lines):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            if name := _environ_item(node.targets[0]):
                yield Setting(name, _constant(node.value), path, node.lineno, node.col_offset + 1)
        elif isinstance(node, ast.Call):
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            function = ast.unparse(node.func) if attribute in ("setdefault", "putenv", "update") else ""
            if function in ("os.environ.setdefault", "os.putenv", "environ.setdefault") and len(node.args) == 2:
                name = _constant(node.args[0])
                if name:
                    yield Setting(name, _constant(node.args[1]), path, node.lineno, node.col_offset + 1)
            elif function in ("os.environ.update", "environ.update"):
                for keyword in node.keywords:
                    if keyword.arg:
                        where = (keyword.value.lineno, node.col_offset + 1)
                        yield Setting(keyword.arg, _constant(keyword.value), path, *where)
                for given in node.args:
                    if isinstance(given, ast.Dict):
                        for key, value in zip(given.keys, given.values, strict=True):
                            if key is not None and (name := _constant(key)):
                                yield Setting(name, _constant(value), path, key.lineno, key.col_offset + 1)


def _around(statements: Sequence[ast.stmt], lines: Sequence[int]) -> Iterator[ast.AST]:
    """Yield the nodes of the statements that stand in some lines; a walk over all of a file takes most of the time."""
    for statement in statements:
        last = statement.end_lineno or statement.lineno
        first = bisect_left(lines, statement.lineno)
        if first == len(lines) or lines[first] > last:
            continue
        inner: list[ast.stmt] = []
        for name, value in ast.iter_fields(statement):
            parts = value if isinstance(value, list) else [value]
            if name in ("body", "orelse", "finalbody"):
                inner += parts
            elif name in ("handlers", "cases"):
                inner += [below for part in parts for below in part.body]
            else:
                for part in parts:
                    yield from ast.walk(part) if isinstance(part, ast.AST) else ()
        yield statement
        yield from _around(inner, lines)


def _environ_item(node: ast.expr) -> str | None:
    """The name in `os.environ["NAME"]`."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
        return _constant(node.slice)
    return None


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _too_late(tree: ast.AST, path: str) -> Iterator[Finding]:
    """A variable that torch reads as it makes a group, set behind the call that makes it, in the same block."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):
                continue
            made = 0
            for statement in block:
                value = getattr(statement, "value", None)
                if isinstance(value, ast.Call) and _called(value) == "init_process_group":
                    made = statement.lineno
                elif made and isinstance(statement, ast.stmt) and "destroy_process_group" in ast.dump(statement):
                    made = 0
                elif made and isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    name = _environ_item(statement.targets[0]) or ""
                    if GROUP_IS_MADE_WITH.match(name):
                        message = (
                            f"torch reads {name} as it makes the group, in line "
                            f"{made}: this comes too late on all ranks."
                        )
                        where = (path, statement.lineno, statement.col_offset + 1)
                        yield finding(
                            "DDP560", where, message, f"Set {name} before init_process_group, or in the script."
                        )
