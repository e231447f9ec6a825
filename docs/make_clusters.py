"""Write docs/clusters/, a page for each preset, and list them in mkdocs.yml: python docs/make_clusters.py.

The pages hold what `ddp-scaffold presets show` prints. A test fails when they differ from the presets of today.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from ddp_scaffold.presets.facts import HOW
from ddp_scaffold.presets.fields import LEFT_OPEN, Table, gpus, tables
from ddp_scaffold.presets.load import files, load_with_origins
from ddp_scaffold.presets.schema import Preset

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "clusters"
NAV = ROOT / "mkdocs.yml"
CHOICES = ROOT / "templates" / "questions" / "presets.yml"  # what the wizard shows, in an order for people

SCHEDULERS = {"none": "", "slurm": "Slurm", "pbs": "PBS", "kubernetes": "Kubernetes", "skypilot": "SkyPilot"}
STATUS = {"documented": "from the site's or vendor's own pages", "community": "mostly from public scripts of its users"}
PROSE = {"gpu", "account", "container", "env_scripts", "preemption"}  # fields whose values are no code
LISTS = {"storage", "hangs"}  # fields whose name says nothing about each of their values
WORDS = {LEFT_OPEN: "left open", "yes": "yes", "no": "no"}

HEAD = (
    "The tests [start these jobs](../presets.md#a-dry-start) to the first line of training on every node, without the "
    "cluster. They cannot know:\n\n"
)

TOP = "ai|ca|ch|co|com|de|edu|eu|fi|fr|gov|io|it|nl|org|se|uk"
# github.com/OWNER/NAME PATH, as sources name a file of a repository; any other address.
FILE = r"github\.com/[\w.-]+/[\w.-]+ (?:[\w.-]+/[\w./-]*\w|[\w.-]+\.[a-z]{1,8}\b)"
ADDRESS = rf"(?:[a-z0-9-]+\.)+(?:{TOP})/[A-Za-z0-9_./#%?=&~+-]*[A-Za-z0-9_/#]"
LINK = re.compile(rf"(?<![\w@/.-])(?:https?://)?({FILE}|{ADDRESS})")
SPECIAL = re.compile(r"(?<!\w)_|_(?!\w)|[\\`*\[\]{}]")


def pages() -> dict[Path, str]:
    """Return every generated file with its text. Raises PresetError if a preset is broken."""
    loaded = {path.stem: load_with_origins(path) for path in files()}
    listed = list(yaml.safe_load(CHOICES.read_text(encoding="utf-8")).values())
    names = sorted(loaded, key=lambda name: listed.index(name) if name in listed else len(listed))
    written = {FOLDER / f"{name}.md": page(*loaded[name]) for name in names}
    written[FOLDER / "index.md"] = index([loaded[name][0] for name in names])
    entries = "".join(f"      - clusters/{name}.md\n" for name in ("index", *names))
    nav = NAV.read_text(encoding="utf-8")
    return {**written, NAV: re.sub(r"(?<=^  - Clusters:\n)(      - .*\n)*", entries, nav, count=1, flags=re.MULTILINE)}


def index(presets: Sequence[Preset]) -> str:
    """Return the page that lists all presets."""
    header = ("cluster", "preset", "GPUs a node", "started by", "internet", "status", "verified")
    rows = [
        (
            f"[{text(preset.title)}]({preset.name}.md)",
            code(preset.name),
            text(_hardware(preset)),
            ", ".join(filter(None, (SCHEDULERS[preset.scheduler.value], preset.launcher.value))),
            (preset.internet.value or "") if preset.internet else "",
            preset.status,
            str(preset.verified_on),
        )
        for preset in presets
    ]
    return f"""---
hide: [toc]
---

# Clusters

Where a project can train, and what is known about it: a page for each [preset](../presets.md). Yours is not there?
[Make a preset](../presets.md#your-own-cluster) in a minute.

{table(header, rows)}
`documented`: rests on the site's or vendor's own pages. `community`: on public scripts of its users. `internet`:
whether compute nodes have it. An empty cell is not known.
"""


def how(preset: Preset) -> str:
    """Return what starts the ranks."""
    if preset.scheduler.value == "kubernetes":
        return "torchrun starts the ranks of each pod"
    if preset.scheduler.value == "skypilot":
        return "torchrun starts the ranks of each node that it rents"
    return HOW[preset.launcher.value]


def page(preset: Preset, origins: Mapping[str, str]) -> str:
    """Return the page of one preset. `origins`: for each field that it takes over, the preset that has it."""
    title = re.sub(r"^(This|An?|Any) ", lambda found: found[0].lower(), preset.title)
    start = ", ".join(filter(None, (SCHEDULERS[preset.scheduler.value], how(preset))))
    about = "; ".join(filter(None, (_hardware(preset), start)))
    parts = [
        f"# {text(preset.title)}",
        f"<!-- Made by docs/make_clusters.py from templates/presets/{preset.name}.yml: edit that. -->",
        f"For projects that train on {text(title)}: {text(about)}.",
        f"```bash\nddp-scaffold new myproj --preset {preset.name}\n```",
        f"Verified on {preset.verified_on}, {STATUS[preset.status]}. What is not listed is not known; "
        "[how to read this](../presets.md#how-to-read-one).",
        *(section(group, origins) for group in tables(preset, origins)),
        *unknown(preset),
    ]
    if preset.keywords:
        parts.append(f"Keywords: {text(', '.join(preset.keywords))}.")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def unknown(preset: Preset) -> Iterator[str]:
    """Yield what the dry start of this preset's jobs cannot know: it starts them on one machine, without the site."""
    slurm, container = preset.scheduler.value == "slurm", preset.container.value if preset.container else None
    if preset.scheduler.value in ("none", "kubernetes", "skypilot"):
        return
    lines = ["The fabric: whether NCCL or RCCL connect, and whether the plugin, where one is forced, is the right one."]
    if preset.modules and preset.modules.value:
        lines.append("Modules: that these names exist, and what they set. Only what the preset loads is known there.")
    ours = "partitions, QOS" if slurm else "queues"
    lines.append(f"The scheduler's own view: {ours}, limits and accounts are those of this page.")
    if preset.gloo_socket_ifname is None or preset.gloo_socket_ifname.value in (None, "route"):
        lines.append("Interfaces: which one leads from node to node, and that its name is the same on all.")
    if preset.gpu_order or preset.cpu_masks:
        lines.append("Which cores and adapters are next to which GPU.")
    if not slurm:
        lines.append("What mpiexec does beyond its options and variables: binding, signals, its exit code.")
    if preset.master_addr and preset.master_addr.value == "first-host-suffix":
        lines.append("Names: that each node can resolve that of the first one with the suffix.")
    if container:
        lines.append("The image: its Python, its variables (one public image stands for all), its plugin, its driver.")
        if any(flag.startswith("--environment") for flag in container.srun_flags):
            lines.append("The user's EDF: its mounts and its working directory.")
        elif any(flag.startswith("--container-") for flag in container.srun_flags):
            mounted = any(flag.startswith("--container-mounts") for flag in container.srun_flags)
            home = "" if mounted else " No mount of the project is stated: the home directory is taken to be there."
            lines.append(f"enroot's configuration: what it mounts by itself.{home}")
    if preset.env_scripts:
        lines.append("What the site's script sets.")
    yield "## What a dry start cannot know\n\n" + HEAD + "".join(f"- {text(line)}\n" for line in lines)


def section(group: Table, origins: Mapping[str, str]) -> str:
    """Return one group of facts below its heading."""
    heading = f"## {group.title[0].upper()}{group.title[1:]}\n\n"
    if len(group.header) == 1:
        return heading + "".join(f"- {linked(row[0])}\n" for row in group.rows)
    bases = "|".join(map(re.escape, sorted(set(origins.values()))))
    # No source ends like this: it is how fields.py names the preset that a field is taken from.
    taken = re.compile(rf"\(taken from ({bases})\)$")
    rows = [[_cell(*cell, row[0]) for cell in zip(group.header, row, strict=True)] for row in group.rows]
    return heading + table(group.header, [[*row[:-1], taken.sub(r"(taken from [\1](\1.md))", row[-1])] for row in rows])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty."""
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    lines = [[line[column] for column in used] for line in (header, ["---"] * len(header), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text(plain: str) -> str:
    """Return Markdown that shows a text literally, in a table, too."""
    return SPECIAL.sub(r"\\\g<0>", html.escape(plain, quote=False)).replace("|", "&#124;")


def code(value: str) -> str:
    """Return Markdown that shows a value as code, in a table, too."""
    if re.search(r"[`|\\]", value):
        escaped = re.sub(r"[\\*_`|{}\[\]]", lambda found: f"&#{ord(found[0])};", html.escape(value))
        return f"<code>{escaped}</code>"
    return f"`{value}`"


def linked(plain: str) -> str:
    """Return a text as Markdown, with links where it names addresses."""
    parts = LINK.split(plain)  # other text and addresses, in turns
    return "".join(_link(part) if number % 2 else text(part) for number, part in enumerate(parts))


def _link(address: str) -> str:
    repository, _, file = address.partition(" ")
    return f"[{text(address)}](<https://{repository}{f'/blob/HEAD/{file}' if file else ''}>)"


def _cell(column: str, value: str, name: str) -> str:
    """Return a cell of a table of fields.py as Markdown; `name` stands in the first cell of its row."""
    if column in ("field", "limit"):
        return "" if value in LISTS else code(value)
    if column == "where nothing else has it":  # a line to copy: a link would show its address without https://
        return text(value)
    if column != "value" or name in LISTS:
        return linked(value)
    if value in WORDS or name in PROSE or "=" in name:  # VARIABLE=VALUE, and what reads it and why
        return text(WORDS.get(value, value))
    return " ".join(map(code, value.split(", ")))


def _hardware(preset: Preset) -> str:
    return gpus(preset).removesuffix(LEFT_OPEN)


def main() -> None:
    """Write all pages, and remove those of presets that are gone."""
    written = pages()
    for path in set(FOLDER.glob("*.md")) - set(written):
        path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
