"""The weights alone, for inference: `python -m <package>.ddp.export runs/<id>`, which needs `pip install safetensors`.

Writes `weights.safetensors` and `settings.yaml`. What loads them needs no process group, and nothing of `ddp/`:

    from pathlib import Path

    import yaml
    from safetensors.torch import load_model

    from <package>.model import ModelSettings, build_model

    settings = yaml.safe_load(Path("settings.yaml").read_text())
    network = build_model(ModelSettings(**settings["model"]))
    load_model(network, "weights.safetensors")
    network.eval()
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from .errors import CONFIG, ConfigError
from .restore import WRAPPED
from .saving.chosen import CHOICES, read_chosen
from .start.logs import SETTINGS
from .start.settings import leaves

WEIGHTS = "weights.safetensors"


def export(run_dir: Path, to: Path, name: str = "", which: str = "last") -> str:
    """Write the weights of a checkpoint, and the settings of the last start, to the directory `to`.

    Args:
        name: what of the checkpoint; by default the averaged weights if there are any, else the model's.
        which: `last`, the newest that is whole; `best`, by the metric that was evaluated; or a step.

    Returns: a line that says what was written, and another one if something was left out. The run is not changed, and
        may be going on.

    Raises:
        ConfigError: safetensors is not installed, there is nothing to export, or `to` cannot be written to.
    """
    try:
        import safetensors  # noqa: F401 (before the checkpoint is read)
    except ImportError as error:
        raise ConfigError("safetensors is not installed", "pip install safetensors") from error
    _, payload = read_chosen(run_dir, which, lambda _note: None)
    step, objects = payload["counters"]["step"], payload["objects"]
    name = name or ("average" if "average" in objects else "model")
    if name not in objects:
        raise ConfigError(f"the checkpoint holds no {name}", _choice(objects))
    state = bare(objects[name], _wrapped(run_dir, name))
    tensors, tied = weights(state)
    if not tensors:
        raise ConfigError(f"{name} holds no weights", _choice(objects))
    settings = settings_of(run_dir)
    _write(to, tensors, {"format": "pt", "step": str(step), "of": name, **tied}, settings)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    said = f"{to / WEIGHTS}: {len(tensors)} tensors, {size:.1f} MB, {name} of step {step}; settings in {to / SETTINGS}"
    said += "" if settings else f"\nno settings of this run can be read: {SETTINGS} is empty"
    if others := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        how = f'network.load_state_dict(load_file("{WEIGHTS}"), strict=False)'
        said += f"\nleft out, as no tensors: {', '.join(others)}; {how} does without them, load_model does not"
    return said


def _choice(objects: Mapping[str, Mapping[str, Any]]) -> str:
    """What to do: an optimizer's tensors lie deeper, and nothing loads them from such a file."""
    whole = [name for name, state in objects.items() if any(isinstance(each, torch.Tensor) for each in state.values())]
    return f"choose with --of: {', '.join(whole)}" if whole else "nothing in this checkpoint is a network's state"


def _write(to: Path, tensors: dict[str, torch.Tensor], about: dict[str, str], settings: dict[str, Any]) -> None:
    """Both files, or none of them.

    Raises:
        ConfigError: `to` cannot be written to, or safetensors does not take these tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=to) as name:
            aside = Path(name)
            (aside / SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False))
            save_file(tensors, aside / WEIGHTS, metadata=about)
            shutil.copymode(aside / SETTINGS, aside / WEIGHTS)  # safetensors 0.8 leaves it readable by its owner only
            for file in (SETTINGS, WEIGHTS):
                os.replace(aside / file, to / file)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        problem = f"nothing is exported to {to}: {type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, OSError) or "I/O error" in str(error):
            raise ConfigError(problem, "give --to a directory that can be made and written to, with room") from error
        raise ConfigError(problem, "choose another part of the checkpoint with --of") from error


def bare(state: Mapping[str, Any], wrapped: Sequence[str] | None) -> dict[str, Any]:
    """A module's `state_dict()` under the names that the bare module has.

    Args:
        wrapped: names of the modules that a wrapper holds (`restore.wrapped`). None: of an older checkpoint nobody has
            noted them, so what looks like one is taken for one: `module.` before all names, and each `_orig_mod.`.
    """
    averages = {"n_averaged"}
    if wrapped is None:
        if all(key.startswith("module.") for key in state.keys() - averages):
            state = {key.removeprefix("module."): value for key, value in state.items() if key not in averages}
        return {re.sub(r"(^|\.)_orig_mod\.", r"\1", key): value for key, value in state.items()}
    averages = {f"{path.removesuffix('module')}n_averaged" for path in wrapped if path.endswith("module")}
    found = {key: value for key, value in state.items() if key not in averages}
    for path in sorted(wrapped, key=len, reverse=True):  # the innermost first: those around it keep their names
        above = path.rpartition(".")[0]
        outer = f"{above}." if above else ""
        found = {_renamed(key, f"{path}.", outer): value for key, value in found.items()}
    return found


def _renamed(key: str, before: str, after: str) -> str:
    return after + key.removeprefix(before) if key.startswith(before) else key


def _wrapped(run_dir: Path, name: str) -> list[str] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [str(path) for path in json.loads((run_dir / WRAPPED).read_text())[name]]
    return None


def weights(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a `state_dict()`, contiguous.

    Returns: the tensors, and for each that is another one once more (tied weights) the name of that one. The file
        holds it once, and `safetensors.torch.load_model` knows.
    """
    state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()  # safetensors takes no two tensors of one storage
    for key, tensor in state.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and (same := first.setdefault((*place, tensor.dtype), key)) != key:
            tied[key] = same
            continue
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        whole = tensor.is_contiguous() and alone
        kept[key] = tensor.detach() if whole else tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept, tied


def settings_of(run_dir: Path, typed: bool = True) -> dict[str, Any]:
    """The settings of the last start, by section; empty if there are none. In the place of `auto`, what was chosen.

    From settings.yaml, or from the text where an older release, which does not write that, has made the last start.

    Args:
        typed: guess types from the text: an id 0123 would be a number. Without, it is left to who knows the settings.
    """
    path = run_dir / "settings.txt"
    text = path.read_text(errors="replace") if path.is_file() else ""
    values: dict[str, Any] = {}
    with suppress(OSError, yaml.YAMLError, AttributeError):
        values = dict(yaml.safe_load((run_dir / SETTINGS).read_text(errors="replace")).items())
        rows = {re.escape(".".join(where)): re.escape(str(value)) for where, value in leaves(values)}
        if all(re.search(rf"^  {name} +(auto: )?{value}  \(", text, re.MULTILINE) for name, value in rows.items()):
            return values
    settings: dict[str, Any] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"  (\S+)\s{2,}(.*)  \(.*\)", line):
            *sections, key = found[1].split(".")
            inner = settings
            for section in sections:
                inner = inner.setdefault(section, {})
            plain = found[2].removeprefix("auto: ")
            inner[key] = _value(plain) if typed or plain == "None" or plain[:1] in "[{(" else plain
    return settings or values


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # plain text
        return text


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run: runs/<id>")
    parser.add_argument("--to", type=Path, help="directory for the two files; export/ in the run by default")
    parser.add_argument("--checkpoint", default="last", metavar="WHICH", help=f"{CHOICES}; last by default")
    parser.add_argument("--of", default="", help="what of the checkpoint: average if there is one, else model")
    options = parser.parse_args()
    try:
        print(export(options.run, options.to or options.run / "export", options.of, options.checkpoint))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG
    except OSError as error:
        print(f"error: {options.run}: {error}\n  -> give the directory of a run: runs/<id>", file=sys.stderr)
        return CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
