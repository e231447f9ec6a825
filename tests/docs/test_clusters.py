"""docs/clusters/: what the presets say today, every field of them, and shown literally."""

from __future__ import annotations

import datetime
import importlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_scaffold.presets import load
from ddp_scaffold.presets.schema import Preset

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
make_clusters = importlib.import_module("make_clusters")

NASTY = "a|b *c* _d_ <e> [f](g) `h` {i} \\j & docs.example.org/k_l_m/page.html: n_o, github.com/x/y v2.3 z/_w_.md"


def fact(value: Any, source: str = "a page of the site", **more: Any) -> dict[str, Any]:
    return {"value": value, "source": source, "confidence": "documented", **more}


FULL = {
    "name": "full",
    "title": "A cluster with everything",
    "extends": "base",
    "keywords": ["the-word"],
    "verified_on": datetime.date(2026, 7, 22),
    "status": "community",
    "scheduler": fact("slurm"),
    "launcher": fact("ibrun"),
    "accelerator": fact("rocm"),
    "gpu": fact("Some GPU"),
    "gpus_per_node": fact(4, verified_on=datetime.date(2025, 1, 2)),
    "cpus_per_node": fact(1111),
    "cpus_per_task": fact(222),
    "gpu_request": fact("gpus-per-task"),
    "gpu_type": fact("some-type"),
    "chunk": fact("system=some"),
    "gpu_order": fact([33, 22, 11, 0]),
    "sees": fact("one"),
    "cpu_masks": fact(["0xfe", "0xfe00", "0xfe0000", "0xfe000000"]),
    "directives": fact(["--constraint=a|b"]),
    "launch_flags": fact(["--kill-flag=1"]),
    "forbidden_flags": fact(["--gres"]),
    "account": fact({"required": True, "pattern": "m[0-9]+", "example": "m1234"}),
    "partition": fact("two-queue"),
    "qos": fact("one-queue"),
    "limits": [
        fact({"name": "one-queue", "by": "qos", "min_nodes": 5, "max_nodes": 77, "max_walltime": "1-00:00:01"}),
        fact({"name": "two-queue", "min_nodes": 78, "preemptible": True, "note": "of limits"}),
    ],
    "gpu_resource": fact("some.com/gpu"),
    "pod_resources": fact({"some.com/ib": "8"}),
    "pod_annotations": fact({"some.com/net": "[{}]"}),
    "node_selector": fact({"some.com/pool": "a"}),
    "tolerations": fact(["some.com/gpu:NoSchedule"]),
    "capabilities": fact(["IPC_LOCK"]),
    "host_paths": fact({"/usr/lib/a": "/home/a"}),
    "sidecar": fact(
        {"name": "some-daemon", "image": "example.org/x:1", "command": ["run-it"], "capabilities": ["NET_X"]}
    ),
    "sky_infra": fact("some-cloud/region"),
    "sky_accelerator": fact("XY-9000"),
    "sky_spot": fact(True),
    "sky_multi_node": fact(False),
    "sky_network_tier": fact("best"),
    "sky_store": fact("nebius"),
    "master_addr": fact("first-host-suffix"),
    "commands": fact(["conda activate base"]),
    "uenv": fact({"image": "pytorch/v9:v1", "view": "some-view"}),
    "torch_index": fact("https://index.example.org/rocm"),
    "needs": [fact({"what": "torch", "by": "user", "add": "pip install it --index-url https://a.example.org/x"})],
    "master_suffix": fact("-suffix"),
    "nccl_socket_ifname": fact("^docker"),
    "gloo_socket_ifname": fact("route"),
    "env": [
        {"name": "VAR", "value": "$X|y", "read_by": "Reader", "since": "2.1", "why": NASTY, "source": "s"}
        | {"confidence": "seen", "min_nodes": 2, "partition": "gpu-part", "instead": "another value"}
        | {"gpu": "XY12", "min_plugin": "3.4", "max_plugin": "5.6"}
    ],
    "recovery": [{"name": "REC", "value": "1", "read_by": "R2", "why": "w", "source": "s", "confidence": "seen"}],
    "modules": fact(["mod/1.2"]),
    "module_paths": fact(["/opt/paths"]),
    "library_paths": fact(["/opt/libraries"]),
    "env_scripts": [fact({"path": "/opt/script.sh", "min_nodes": 3})],
    "container": fact({"srun_flags": ["--container-image={image}"], "image": "an image"}),
    "internet": fact("proxy"),
    "scratch": fact("$SCRATCH"),
    "node_local": fact("/local"),
    "storage": [fact("purged after a week")],
    "requeue": fact(True),
    "preemption": fact({"grace_s": 44, "note": "of preemption"}),
    "stop_signal_lead_s": fact(99),
    "notes": [fact(NASTY, source=NASTY)],
    "hangs": [fact("hangs at the start")],
    "not_found": ["the purge of scratch"],
}


@pytest.fixture
def full() -> tuple[Preset, dict[str, str]]:
    """A preset that has all fields, more than `presets check` would accept together; one is taken from another."""
    return Preset.model_validate(FULL), {"gloo_socket_ifname": "base"}


class Page(HTMLParser):
    """The rows of a page's tables, and where its links go."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.inside = tag in ("td", "th") or (self.inside and tag in ("code", "a"))
        assert tag != "em", "emphasis that nobody meant"
        if tag == "a":
            self.links.append(dict(attrs)["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_pages_are_those_of_the_presets() -> None:
    written = make_clusters.pages()
    stale = {path.name for path, content in written.items() if not path.exists() or path.read_text("utf-8") != content}
    gone = {path.name for path in make_clusters.FOLDER.glob("*.md")} - {path.name for path in written}
    assert not stale | gone, "run `make clusters`"
    assert {f"{path.stem}.md" for path in load.files()} == {path.name for path in written} - {
        "index.md",
        "mkdocs.yml",
    }


def test_the_navigation_lists_every_page() -> None:
    nav = yaml.safe_load(re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text("utf-8")))["nav"]
    listed = next(entry["Clusters"] for entry in nav if "Clusters" in entry)
    assert listed[:2] == ["clusters/index.md", "clusters/local.md"]
    assert sorted(listed) == sorted(f"clusters/{p.name}" for p in make_clusters.FOLDER.glob("*.md"))


def test_every_field_of_the_schema_is_on_the_page(full: tuple[Preset, dict[str, str]]) -> None:
    assert set(FULL) == set(Preset.model_fields), "the preset of this test is to have all fields"
    content = make_clusters.page(*full)
    for word in (
        *("A cluster with everything", "--preset full", "2026-07-22", "the-word", "public scripts", "4x Some GPU"),
        *("`slurm`", "ibrun starts one torchrun", "`rocm`", "`4`", "documented, 2025-01-02", "`1111`", "`222`"),
        *("`gpus-per-task`", "`some-type`", "`system=some`", "`33` `22`", "`one`", "`0xfe00`"),
        *("<code>--constraint=a&#124;b</code>", "`--kill-flag=1`", "`--gres`", "for example m1234"),
        *("| `partition` | `two-queue` |", "| `qos` | `one-queue` |", "| `one-queue` | qos | 5 to 77 | 1-00:00:01 |"),
        *("| `two-queue` | partition | 78 or more |", "of limits", "`first-host-suffix`", "`-suffix`", "`^docker`"),
        *("`route`", "(taken from [base](base.md))", "Reader since 2.1", "2 or more nodes", "partition gpu-part"),
        *(
            "another value",
            "| `REC=1` |",
            "`mod/1.2`",
            "`/opt/paths`",
            "`/opt/libraries`",
            "--container-image=",
            "an image",
            "`proxy`",
        ),
        *("`$SCRATCH`", "`/local`", "purged after a week", "| `requeue` | yes |", "44 s from", "of preemption", "`99`"),
        *("`conda activate base`", "pytorch/v9:v1", "some-view", "index.example.org/rocm"),
        *("| torch | you |", "pip install it --index-url https://a.example.org/x |"),
        *("/opt/script.sh", "3 or more", "|  | hangs at the start |", "- the purge of scratch"),
    ):
        assert word in content, f"{word!r} is not in\n{content}"
    assert content.count("(taken from") == 1


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("see https://docs.example.org/a/b.html, below", "https://docs.example.org/a/b.html"),
        ("github.com/owner/name docs/a_b/c.md (a table)", "https://github.com/owner/name/blob/HEAD/docs/a_b/c.md"),
        ("github.com/owner/name README.md", "https://github.com/owner/name/blob/HEAD/README.md"),
        ("github.com/owner/name v2.3 docs/a.md", "https://github.com/owner/name"),
        ("github.com/owner/name issue 3", "https://github.com/owner/name"),
        ("owner/name docs/a.md, train.sbatch, me@docs.example.org/x", None),
    ],
)
def test_addresses_in_sources_are_links(text: str, link: str | None) -> None:
    assert re.findall(r"\(<(.*?)>\)", make_clusters.linked(text)) == ([link] if link else [])


def test_texts_are_shown_literally(full: tuple[Preset, dict[str, str]]) -> None:
    markdown = pytest.importorskip("markdown", reason="needs mkdocs-material: pip install -e '.[docs]'")
    html = markdown.markdown(make_clusters.page(*full), extensions=["tables", "attr_list", "admonition"])
    page = Page(html)
    width = 0
    for row in page.rows:
        width = len(row) if row[-1] == "source" else width
        assert len(row) == width, row
    cells = [cell for row in page.rows for cell in row]
    assert cells.count(NASTY) == 2  # a note and its source
    assert any(f": {NASTY}; " in cell for cell in cells)  # why a line of an environment file is there
    assert "VAR=$X|y" in cells
    assert "--constraint=a|b" in cells
    assert set(page.links) - {"../presets.md#how-to-read-one", "../presets.md#a-dry-start", "base.md"} == {
        "https://docs.example.org/k_l_m/page.html",
        "https://github.com/x/y",
    }


def test_the_index_lists_every_preset(full: tuple[Preset, dict[str, str]]) -> None:
    content = make_clusters.index([full[0]])
    row = "| [A cluster with everything](full.md) | `full` | 4x Some GPU | Slurm, ibrun | proxy |"
    assert f"{row} community | 2026-07-22 |" in content
