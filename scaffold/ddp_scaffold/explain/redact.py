"""Writes a copy of logs that can be posted: what names a person, a machine or a secret is replaced, the same each time.

Ranks, sequence numbers, times, operations, sizes, line numbers and the names of source files stay, so that the copy
explains itself as the original does. Flight-recorder dumps are read as the untrusted data that they are, and written
anew as containers, text and numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from ddp_scaffold._errors import ScaffoldError, UsageError

from .flight_recorder import MOST_BYTES, dump_of, plain
from .sources import ARCHIVES, GZIP, ZSTD, Source, blocks, format_of, is_binary, is_dump_of_json

PACKED = (GZIP, ZSTD)
PIECE = 2**20  # bytes of a line that are looked at together; a longer line is cut there
NO_CONTROL = bytes({*range(32, 256), *b"\t\n\r\b\f\x1b"} - {127})
PACKAGES = ("site-packages/", "dist-packages/", "torch/distributed/", "torch/nn/", "torch/autograd/")
PUBLIC = ("/usr/", "/opt/", "/proc/", "/dev/", "/sys/", "/etc/")
LOOPBACK = {"127.0.0.1", "0.0.0.0", "::1", "::"}

# What may stand before a mark has a limit: else a long line of "a_a_a_" is read to its end from each of its places.
_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bglpat-[\w-]{16,}|\b[0-9a-f]{40}\b"
)
_NAMED_SECRET = re.compile(
    r"(?i)(?<![A-Za-z0-9])((?:\w{0,64}(?:_|api|access|secret)KEY(?:_ID)?|\w{0,64}(?:TOKEN|PASSWORD|PASSWD|SECRET))"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',;}]{4,})"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{12,})")
_LOGIN = re.compile(r"(://)([^\s/@:]+(?::[^\s/@]*)?)(@)")
_MAIL = re.compile(r"\b[\w.+-]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+\b")
_MAC = re.compile(r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b")
_V4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w]|\.\d)")
_V6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_PATH = re.compile(r"(?<![\w:/.>])~?/(?:[\w.@+%=-]+/)+[\w.@+%=-]*")
_GROUP = re.compile(r"(\[PG (?:ID \d+ PG GUID )?\w+ ?\()([^)\n]{1,200})(\))")  # the description of a process group
_HOME = re.compile(r"/(?:home|Users|users|u|scratch|data/home|gpfs/home|mnt/home)/([\w.-]+)")
# where a log tells a host or a user: these are learned, and replaced wherever they stand as a word
_HOSTS = (
    re.compile(rb"\bhost\s*[:=]\s*[\"']?([A-Za-z][\w.-]*)"),
    re.compile(rb"\"host\":\s*\"([A-Za-z][\w.-]*)\""),
    re.compile(rb"\bhost_?name[\"']?\s*[:=]\s*[\"']?([A-Za-z][\w.-]*)"),
    re.compile(rb"(?:^|\s)([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] (?:\S+ )?NCCL"),
    re.compile(rb"srun: error: ([A-Za-z][\w.-]*): tasks? "),
    re.compile(rb"\bON ([A-Za-z][\w.-]*) CANCELLED AT"),
    re.compile(rb"\b(?:HOSTNAME|MASTER_ADDR|SLURMD_NODENAME|SLURM_LAUNCH_NODE_IPADDR)=[\"']?([A-Za-z][\w.-]*)"),
    re.compile(rb"\bremote=\[?([A-Za-z][\w.-]*)\]?:\d+"),
    re.compile(rb"(?i)\bconnect(?:ing|ed)? to \(?([A-Z][\w-]*(?:\.[\w-]+)+)[,:]"),
    re.compile(rb"(?i)\bconnect(?:ing|ed)? to \[?([A-Z][\w-]*(?:\.[\w-]+)*)\]?:\d"),
    re.compile(rb"endpoint[\"']?\s*[:=]\s*[\"']?([A-Za-z][\w.-]*):\d"),
    re.compile(rb"\btcp://\[?([A-Za-z][\w.-]*)\]?:\d"),
    re.compile(rb"\bnode '([A-Za-z][A-Za-z0-9.-]*)_\d+_\d+'"),  # of torchrun's rendezvous
)
_USERS = (
    re.compile(rb"/(?:home|Users|users)/([\w.-]+)"),
    re.compile(rb"\\Users\\([\w.-]+)"),
    re.compile(rb"\b[Ll]ogged in as:? ([\w.-]+)"),
    re.compile(rb"\bssh (?:-\S+ )*([\w.-]+)@"),
    re.compile(rb"\b(?:USER|LOGNAME|SLURM_JOB_USER|user)=[\"']?([A-Za-z][\w.-]+)"),
)
_NODES = re.compile(r"((?:NODELIST|NodeList)=|srun: error: | ON )([A-Za-z][\w-]*)\[(\d[\d,-]*)\]")  # Slurm's short form
MOST_NODES = 4096
_URL = re.compile(r"\b((?:https?|s3|gs|hdfs|abfss?|oss)://)(?!user:secret@)([^\s\"'<>)\]`]+)")
_PUBLIC_URL = re.compile(r"(?:[\w-]+\.)?(?:pytorch\.org|nvidia\.com|python\.org|readthedocs\.io)/|github\.com/pytorch/")
_COMMON = {"root", "user", "localhost", "host", "unknown", "none", "null", "rank", "node", "name", "train", "data"}
_COMMON |= {"store", "server", "peer", "master", "worker", "torch", "nccl", "cuda", "error", "local", "the"}
_PUBLIC_GROUPS = {"", "default_pg", "undefined"}  # what torch itself calls groups
_DEEPEST = 16  # containers within each other: a dump has six

_KEYS = ""  # what the keys of a dump themselves stand below
_GROUP_KEYS = frozenset({_KEYS, "name", "process_group", "desc"})  # below which the name of a process group stands
Value = object  # of a dump: a container, text or a number


class _Names:
    """Numbers what is replaced, in the order in which it is met."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}
        self.words: dict[str, str] = {}  # hosts and users that were learned
        self._word: re.Pattern[str] | None = None

    def of(self, kind: str, value: str, form: Callable[[int], str]) -> str:
        known = self._known.setdefault(kind, {})
        return known.setdefault(value, form(len(known) + 1))

    def learn(self, kind: str, value: str) -> None:
        """Remember a host or a user; a host's full name gets the number of its short one."""
        short, _, domain = value.partition(".") if kind == "host" else (value, "", "")
        if short.lower() in _COMMON or re.fullmatch(r"(?:host|user)-\d+", short) or len(short) < 2:
            return
        self.words.setdefault(short, self.of(kind, short, lambda number: f"{kind}-{number}"))
        if domain:
            self.words.setdefault(value, f"{self.words[short]}.example.org")
        self._word = None

    def replace_words(self, text: str) -> str:
        if not self.words:
            return text
        if self._word is None:
            longest_first = sorted(self.words, key=lambda word: (-len(word), word))
            self._word = re.compile(
                rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z0-9-]|_(?!\d+_\d))"
            )
        return self._word.sub(lambda found: self.words[found[0]], text)


def redact(paths: Sequence[str], destination: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Write copies of the files at `paths`, and below those that are folders, to the new folder `destination`.

    Links, whatever is no regular file, and files that are neither text nor a flight-recorder dump (checkpoints) are
    left out. Returns the files written, and notes of what was left out. Files' names are redacted as their content is.

    Raises UsageError where `destination` exists or cannot be made, or nothing can be read.
    """
    files, notes = [], []
    names = _Names()
    for file, relative in _files(paths):
        try:
            files.append((file, relative, _learn(file, names)))
        except (OSError, ScaffoldError) as error:
            notes.append(
                f"{file} was left out: {error.message if isinstance(error, ScaffoldError) else error.strerror}"
            )
    if not files:
        raise UsageError("There is no text file to redact.", "Name a log, or a folder of logs.")
    try:
        destination.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"{destination} exists already.", "Name a new folder: nothing is overwritten.") from error
    except OSError as error:
        raise UsageError(f"{destination} cannot be made: {error.strerror}.", "Name another folder.") from error
    return tuple(_copy(file, relative, is_dump, destination, names) for file, relative, is_dump in files), tuple(notes)


def _files(paths: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    """Each file, and where its copy belongs. Several paths of one name get numbers."""
    seen: dict[str, int] = {}
    for path in map(Path, paths):
        name = path.name or "input"
        seen[name] = seen.get(name, 0) + 1
        top = Path(name if seen[name] == 1 else f"{seen[name]}-{name}")
        if path.is_dir() and not path.is_symlink():
            for folder, below, found in os.walk(path):
                below.sort()
                for each in sorted(found):
                    file = Path(folder, each)
                    yield file, top / file.relative_to(path)
        else:
            yield path, top


def _opened(file: Path) -> BufferedReader:
    """Raises OSError for links, and for what is no regular file: neither is opened for long, nor waited for."""
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(0, "it is no regular file")
    return os.fdopen(number, "rb")


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield a text in lines, unpacked, and a long line in parts."""
    with _opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    rest = b""
    for block in blocks(Source(str(file), str(file), format_of(str(file)), size), PIECE):
        *lines, rest = (rest + block).splitlines(keepends=True)
        yield from lines
        if rest.endswith(b"\n") or len(rest) >= PIECE:
            yield rest
            rest = b""
    if rest:
        yield rest


def _is_text(begin: bytes) -> bool:
    """Tell whether a file's begin is text: what is packed has few zeros, but many other control characters."""
    return 50 * len(begin.translate(None, NO_CONTROL)) <= len(begin) and not is_binary(begin)


def _learn(file: Path, names: _Names) -> bool:
    """Remember what a file names; tell whether it is a dump. Raises UsageError where it is neither dump nor text."""
    with _opened(file) as stream:
        begin = stream.read(4096)
    if begin.startswith(PACKED):
        begin = next(_pieces(file), b"")[:4096]
        if not begin:
            raise UsageError("it cannot be unpacked", "Leave it out.")
    is_text = _is_text(begin)
    if begin.startswith(b"\x80") or (begin.startswith(b"{") and is_dump_of_json(str(file))):
        with contextlib.suppress(UsageError) if is_text else contextlib.nullcontext():
            _rewritten(_record(file), lambda key, text: _learn_from(f"{key}={text}".encode(errors="replace"), names))
            return True
    if not is_text:
        what = "is packed: unpack it first" if begin.startswith(tuple(ARCHIVES)) else "is neither text nor"
        raise UsageError(f"it {what}" + ("" if "packed" in what else " a flight-recorder dump"), "Leave it out.")
    for piece in _pieces(file):
        _learn_from(piece, names)
    return False


def _learn_from(piece: bytes, names: _Names) -> str:
    for kind, patterns in (("host", _HOSTS), ("user", _USERS)):
        for pattern in patterns:
            for found in pattern.findall(piece):
                names.learn(kind, found.decode(errors="replace").rstrip("."))
    if b"[" in piece:
        for found in _NODES.finditer(piece.decode(errors="replace")):
            for host in _nodes(found[2], found[3]):
                names.learn("host", host)
    return ""


def _nodes(prefix: str, numbers: str) -> Iterator[str]:
    """Yield the hosts of Slurm's short form: "n" and "01-03,7" are n01, n02, n03 and n7."""
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            stop = min(int(last or first), int(first) + MOST_NODES)
            yield from (f"{prefix}{number:0{len(first)}}" for number in range(int(first), stop + 1))


def _copy(file: Path, relative: Path, is_dump: bool, destination: Path, names: _Names) -> Path:
    parts = [names.replace_words(part) for part in relative.parts]
    with _opened(file) as stream:
        if stream.read(4).startswith(PACKED):  # the copy is not packed
            parts[-1] = parts[-1].removesuffix(".gz").removesuffix(".zst")
    target = destination.joinpath(*parts)
    if target.exists():
        target = target.with_name(f"unpacked-{target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as stream:
        if is_dump:
            record = _rewritten(_record(file), lambda key, text: _in_dump(key, text, names))
            is_json = is_dump_of_json(str(file))
            stream.write(json.dumps(record).encode() if is_json else pickle.dumps(record, protocol=2))
            return target
        for piece in _pieces(file):
            text = piece.decode(errors="surrogateescape")
            stream.write(redacted(text, names).encode(errors="surrogateescape"))
    return target


def _record(file: Path) -> Value:
    """Return what a dump holds. Raises UsageError where it cannot be read, or is no dump."""
    with _opened(file) as stream:
        record = plain(stream.read(MOST_BYTES + 1), str(file))
    dump_of(record, 0, str(file))
    return record


def _in_dump(key: object, text: str, names: _Names) -> str:
    """Return what to write for a text of a dump. The name of a process group, a number or a hash, stays."""
    if key == "filename" and text.startswith("/"):
        return names.replace_words(_path(text, names))
    if key in _GROUP_KEYS and re.fullmatch(r"\d+|[0-9a-f]{40}", text):
        return text
    return _group(text, names) if key in {"process_group", "desc"} else redacted(text, names)


def _group(text: str, names: _Names) -> str:
    """Return what to write for the description of a process group."""
    if text in _PUBLIC_GROUPS or re.fullmatch(r"group-\d+", text):
        return text
    return names.of("group", text, lambda number: f"group-{number}")


def _rewritten(value: Value, change: Callable[[object, str], str]) -> Value:
    """Return a copy of a dump in which `change`, given the key below which it stands, has been made to each text.

    What is shared stays shared. Raises UsageError where containers are deeper within each other than in any dump.
    """
    known: dict[tuple[object, object], Value] = {}

    def walk(value: Value, key: object, depth: int) -> Value:
        if isinstance(value, str):
            place: tuple[object, object] = (key, value)
            if place not in known:
                known[place] = change(key, value)
            return known[place]
        if not isinstance(value, dict | list | tuple):
            return value
        if depth > _DEEPEST:
            raise UsageError("its containers are deeper within each other than in any dump", "Leave it out.")
        key = key if key in _GROUP_KEYS else None  # so that a list below a million keys is not copied as often
        place = (key, id(value))
        if place not in known:
            if isinstance(value, dict):
                known[place] = {
                    walk(name, _KEYS, depth + 1): walk(item, name, depth + 1) for name, item in value.items()
                }
            else:
                items = [walk(item, key, depth + 1) for item in value]
                known[place] = items if isinstance(value, list) else tuple(items)
        return known[place]

    return walk(value, None, 0)


def redacted(text: str, names: _Names) -> str:
    """Return `text` with all that is private replaced."""

    def secret(found: re.Match[str]) -> str:
        return names.of("secret", found[0], lambda number: f"secret-{number}")

    def after(found: re.Match[str]) -> str:
        if re.fullmatch(r"secret-\d+", found[2]):
            return found[0]
        return found[1] + names.of("secret", found[2], lambda number: f"secret-{number}")

    text = _GROUP.sub(lambda found: found[1] + _group(found[2], names) + found[3], text)
    text = _SECRET.sub(secret, text)
    text = _NODES.sub(
        lambda found: f"{found[1]}{names.of('nodes', found[2], lambda number: f'nodes-{number}-')}[{found[3]}]", text
    )
    text = _LOGIN.sub(lambda found: found[1] + "user:secret" + found[3], text)
    text = _URL.sub(lambda found: found[1] + _url(found[2], names), text)
    text = _NAMED_SECRET.sub(after, text)
    text = _BEARER.sub(after, text)
    text = _MAIL.sub(lambda found: names.of("mail", found[0], lambda number: f"mail-{number}@example.org"), text)
    text = _PATH.sub(lambda found: _path(found[0], names), text)
    text = _MAC.sub(lambda found: names.of("mac", found[0].lower(), _mac), text)
    text = _V4.sub(lambda found: _kept(found[0]) or names.of("v4", found[0], _v4), text)
    text = _V6.sub(lambda found: _v6(found[0], names), text)
    return names.replace_words(text)


def _url(place: str, names: _Names) -> str:
    if _PUBLIC_URL.match(place) or re.fullmatch(r"url-\d+\.example\.org", place):
        return place
    return names.of("url", place, lambda number: f"url-{number}.example.org")


def _path(path: str, names: _Names) -> str:
    """Keep what is public of a path (the package, or the system's folder), and the file's name."""
    for mark in PACKAGES:
        if mark in path:
            return "/env/" + path[path.index(mark) :]
    if path.startswith(PUBLIC):
        return path
    folder, _, name = path.rpartition("/")
    home = _HOME.match(folder)
    if home and folder == home[0]:
        return "/home/" + names.of("user", home[1], lambda number: f"user-{number}") + "/" + name
    return names.of("folder", folder, lambda number: f"/folder-{number}") + "/" + name


def _kept(address: str) -> str | None:
    return address if address in LOOPBACK or address.startswith("127.") else None


def _v4(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def _mac(number: int) -> str:
    return f"02:00:00:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:{number & 255:02x}"


def _v6(address: str, names: _Names) -> str:
    """A time of day looks much like one: an address has seven colons, or two together and a digit."""
    if address in LOOPBACK or not (address.count(":") == 7 or ("::" in address and re.search(r"\w", address))):
        return address
    return names.of("v6", address.lower(), lambda number: f"fd00::{number:x}")
