"""What takes minutes: evaluation and sampling, reading all files, other programs, pools, fits, downloads.

It is told from what a call does, down to some functions, and not from its name alone.
"""

from __future__ import annotations

import ast
import re

from .context import Context, declines
from .effects import without_gradients
from .module import Call, Function, dotted, keyword, shown

MODEL = re.compile(
    r"(?:.*_)?(?:model|net|generator|encoder|decoder|unet|pipe|pipeline|diffusion|ema)(?:_.*)?", re.IGNORECASE
)
NO_FORWARD = {"parameters", "named_parameters", "state_dict", "load_state_dict", "eval", "train", "modules", "buffers"}
DATA = re.compile(r"load|data|batch|test|val|reader|split|image|file|clip|video|sample|query|queries|gallery|episode")
TRIAL = re.compile(r"(?:is_|_)?debug(?:_mode|ging)?|dry_?run|(?:fast_dev|smoke)_?(?:run|test)", re.IGNORECASE)
FITS = {"fit", "fit_transform", "fit_predict", "train"}
FITTED = re.compile(
    r"faiss\.|umap\.|hdbscan\.|sklearn\.(?:cluster|manifold|linear_model|svm|neighbors|mixture|ensemble|decomposition)"
)
HEAVY_NAMES = re.compile(
    r"tarfile\..*extractall|zipfile\..*extractall|shutil\.unpack_archive|datasets\.load_dataset"
    r"|huggingface_hub\.snapshot_download|(?:.*\.)?download_and_(?:unzip|extract)\w*|gdown\.\w+"
    r"|urllib\.request\.urlretrieve|scipy\.cluster\.vq\.kmeans2?"
)
PREPARES = re.compile(
    r"(?:^|_)(?:tokeni[sz]e|pre_?process|prepare|build|extract|convert|encode|compute|make|create)_(?:\w+_)?"
    r"(?:data(?:set)?s?|corpus|features?|vocab(?:ulary)?|index(?:es)?|cache|lmdb|memmap|shards|embeddings|clusters)$"
    r"|^convert_\w+_to_features$"
)
POOLS = re.compile(
    r"(?:.*\.)?(?:multiprocessing|mp)\.(?:pool\.|dummy\.)?Pool|ProcessPoolExecutor"
    r"|(?:.*\.)?(?:futures\.)?ProcessPoolExecutor|joblib\.Parallel"
)
# A file of data in each turn of a loop; the ranks' own results are read by torch.load.
READS = re.compile(
    r"PIL\.Image\.open|Image\.open|cv2\.(?:imread|VideoCapture)|imageio\.(?:v2\.)?imread|skimage\.io\.imread"
    r"|torchaudio\.(?:load|info)|librosa\.(?:core\.)?load|soundfile\.read|sf\.read|h5py\.File|nibabel\.load|nib\.load"
    r"|SimpleITK\.ReadImage|decord\.VideoReader|scipy\.io\.wavfile\.read|lmdb\.open|trimesh\.load|pydicom\.dcmread"
)
FEW = re.compile(r"range\(\d{1,2}\)|world_size|get_world|n_?gpus|ranks|checkpoint|ckpt|\[:\s*\w+\]|steps")
STARTS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "os.system"}
# Programs that run for minutes; git, cp and sbatch do not.
PROGRAMS = re.compile(
    r"\b(?:tar|unzip|7z|wget|curl|ffmpeg|java|perl|python3?|spm_train)\s|(?:^|\s)\./\S*eval|\beval\w*/\S*eval"
)
AWAY = re.compile(r"--version|python3? -c\s|-m pip|pip install|&\s*$|nohup")


def evaluates(context: Context, function: Function, depth: int = 0, quiet: bool = False) -> bool:
    """Tell whether a function runs a model without gradients in a loop over data, itself or in what it calls once."""
    quiet = quiet or any(call.last == "eval" for call in function.calls)
    for call in function.calls:
        over = [loop for loop in call.place.loops if not is_cut(loop) and DATA.search(head(function, loop))]
        if over and infers(context, call, 0, quiet):
            return True
        target = context.program.called(call)
        if target is None or target is function or depth > 1 or call.place.loops:
            continue
        if evaluates(context, target, depth + 1, quiet or without_gradients(call)):
            return True
    return False


def infers(context: Context, call: Call, depth: int, quiet: bool) -> bool:
    """Tell whether a call runs a model without gradients, itself or in functions of these files."""
    quiet = quiet or without_gradients(call)
    if call.last in NO_FORWARD:
        return False
    node = call.node.func
    name = dotted(node.value if isinstance(node, ast.Subscript) else node)
    if quiet and (any(map(MODEL.fullmatch, name.split("."))) or call.last in ("generate", "sample", "infer")):
        return True
    target = context.program.called(call)
    if target is None or target is call.function or depth > 2:
        return False
    if any(c.last == "backward" for c in target.calls):
        return False
    quiet = quiet or any(c.last == "eval" for c in target.calls)
    return any(infers(context, c, depth + 1, quiet) for c in target.calls)


def head(function: Function, loop: ast.stmt) -> str:
    """Return what a loop goes over, as text: also what `bar` is in `for x in bar`."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return ""
    text = ast.unparse(loop.iter)
    names = {part.id for part in ast.walk(loop.iter) if isinstance(part, ast.Name)}
    made = [a.value for name in names for a in function.assignments.get(name, ()) if a.value is not None]
    return " ".join([text, *(ast.unparse(value) for value in made)]).lower()


def is_cut(loop: ast.stmt) -> bool:
    """Tell whether a loop ends after one turn or some, by a `break` in it, or in an `if` that is not for a trial."""
    body = getattr(loop, "body", ())
    tests = [s for s in body if isinstance(s, ast.If) and not is_for_trial(s.test)]
    inner = [part for test in tests for part in test.body]
    return any(isinstance(statement, ast.Break) for statement in (*body, *inner))


def is_for_trial(test: ast.expr) -> bool:
    """Tell whether a condition is one of a trial of the program: `if args.debug and step > 5`."""
    needed = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(TRIAL.fullmatch(dotted(one).rpartition(".")[2]) for one in needed)


def loops_on(function: Function) -> bool:
    """Tell whether a function has a loop that goes on to the end of its data."""
    return any(not is_cut(loop) for loop, _ in function.loops)


def heavy(context: Context, call: Call, outer: tuple[ast.stmt, ...] = (), depth: int = 0, reach: int = 1) -> str | None:
    """Return what a call does that takes minutes, in words, or None; it may be one turn of loops but the outer ones.

    `reach` is how many functions down that may be.
    """
    if (found := _itself(context, call, outer, depth)) is not None:
        return found
    target = context.program.called(call)
    if target is None or depth > reach or target is call.function:
        return None
    if (
        depth < reach
        and PREPARES.search(call.last)
        and not any(context.effects.of(c) for c in target.calls)
        and loops_on(target)
    ):
        return f"`{call.last}`"
    inside = (c for c in target.calls if not _is_left_out(context, call, target, c))
    inner = next((found for c in inside if (found := heavy(context, c, (), depth + 1, reach)) is not None), None)
    return f"{inner} (in `{target.name}`)" if inner is not None and depth == 0 else inner


def _itself(context: Context, call: Call, outer: tuple[ast.stmt, ...], depth: int) -> str | None:
    """Return what a call of a library does that takes minutes."""
    text = shown(call.node.func, 40)
    if HEAVY_NAMES.fullmatch(call.name) or _fits(context, call) or _maps(call) or _copies_data(call):
        return f"`{text}`"
    if call.name in STARTS and depth < 2 and _is_program(context, call):
        return f"another program (`{text}`)"
    started = call.last == "Process" and any(c.last == "join" for c in call.function.calls)
    if POOLS.fullmatch(call.name) or (started and keyword(call.node, "target") is not None):
        return f"processes of its own (`{text}`)"
    if READS.fullmatch(call.name):
        loop = next((one for one in call.place.loops if one not in outer and _goes_on(call.function, one)), None)
        if isinstance(loop, ast.For):
            return f"`{text}` for each of `{shown(loop.iter, 40)}`"
    return None


def _goes_on(function: Function, loop: ast.stmt) -> bool:
    """Tell whether a loop goes over many things: it is not left early, and over more than a few."""
    return isinstance(loop, ast.For) and not is_cut(loop) and not FEW.search(head(function, loop))


def _is_left_out(context: Context, call: Call, function: Function, inner: Call) -> bool:
    """Tell whether a call in a helper is not made there: who calls it declines, or other ranks make it."""
    if any(part in ("except", "finally") for _, part in inner.place.tries):
        return True
    guards = inner.place.guards
    return any(declines(call, function, g) or context.ranks.guard(function, g) == "others" for g in guards)


def _fits(context: Context, call: Call) -> bool:
    """Tell whether a call fits a model of scikit-learn or the like."""
    owner = dotted(call.node.func).rpartition(".")[0]
    if call.last not in FITS or not owner:
        return False
    values = (a.value for a in context.program.assigned(call.function, owner))
    names = (call.function.module.full_name(v.func) for v in values if isinstance(v, ast.Call))
    return any(FITTED.match(name) for name in names)


def _copies_data(call: Call) -> bool:
    """Tell whether a call copies a folder of data: one of code, which a run keeps, is small."""
    return call.name == "shutil.copytree" and re.search("data|scratch|tmp", ast.unparse(call.node)) is not None


def _maps(call: Call) -> bool:
    """Tell whether a call is `dataset.map(f, batched=True)` of the library datasets."""
    words = {word.arg for word in call.node.keywords}
    return call.last == "map" and bool(words & {"batched", "num_proc", "remove_columns", "load_from_cache_file"})


def _is_program(context: Context, call: Call) -> bool:
    """Tell whether another program is one that runs for minutes, by the texts of its command."""
    given = call.node.args[0] if call.node.args else keyword(call.node, "args")
    if given is None:
        return False
    values = [given]
    for name in (dotted(part) for part in ast.walk(given) if isinstance(part, ast.Name)):
        values += [a.value for a in context.program.assigned(call.function, name) if a.value is not None]
    texts = [str(p.value) for v in values for p in ast.walk(v) if isinstance(p, ast.Constant) and type(p.value) is str]
    text = " ".join(texts) + " "
    return PROGRAMS.search(text) is not None and AWAY.search(text) is None
