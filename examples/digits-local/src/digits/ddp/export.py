"""The weights alone, for inference: `python -m <package>.ddp.export runs/<id>`, which needs `pip install safetensors`.

Writes `weights.safetensors` and `settings.yaml`. What loads them needs no process group, and nothing of `ddp/`:

    settings = yaml.safe_load(Path("settings.yaml").read_text())
    network = build_model(ModelSettings(**settings["model"]))
    safetensors.torch.load_model(network, "weights.safetensors")
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from .errors import CONFIG, ConfigError
from .saving import directory

WEIGHTS, SETTINGS = "weights.safetensors", "settings.yaml"


def export(run_dir: Path, to: Path, name: str = "") -> str:
    """Write the weights of the newest complete checkpoint, and the settings of the last start, to the directory `to`.

    Args:
        name: what of the checkpoint; by default the averaged weights if there are any, else the model's.

    Returns: a line that says what was written. The run is not changed, and may be going on.

    Raises:
        ConfigError: safetensors is not installed, or there is nothing to export.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("safetensors is not installed", "pip install safetensors") from error
    found = directory.read_newest(run_dir / "checkpoints", lambda _note: None, rename=False)
    if found is None:
        raise ConfigError(f"{run_dir} has no complete checkpoint", "give the directory of a run: runs/<id>")
    step, objects = found[1]["counters"]["step"], found[1]["objects"]
    name = name or ("average" if "average" in objects else "model")
    if name not in objects:
        raise ConfigError(f"the checkpoint holds no {name}", f"choose with --of: {', '.join(objects)}")
    tensors, tied = weights(objects[name])
    if not tensors:
        raise ConfigError(f"{name} holds no weights", f"choose with --of: {', '.join(objects)}")
    to.mkdir(parents=True, exist_ok=True)
    aside = to / f".{WEIGHTS}.new"
    save_file(tensors, aside, metadata={"format": "pt", "step": str(step), "of": name, **tied})
    (to / SETTINGS).write_text(yaml.safe_dump(settings_of(run_dir), sort_keys=False))
    os.replace(aside, to / WEIGHTS)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    return f"{to / WEIGHTS}: {len(tensors)} tensors, {size:.1f} MB, {name} of step {step}; settings in {to / SETTINGS}"


def weights(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a module's `state_dict()`, under the names that the bare module has, contiguous.

    Names lose what wrappers put before them: `module.` of DDP and of averages, `_orig_mod.` of torch.compile.

    Returns: the tensors, and for each that is another one once more (tied weights) the name of that one. The file
        holds it once, and `safetensors.torch.load_model` knows.
    """
    state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if all(key.startswith("module.") for key in state.keys() - {"n_averaged"}):
        state = {key.removeprefix("module."): value for key, value in state.items() if key != "n_averaged"}
    state = {re.sub(r"(^|\.)_orig_mod\.", r"\1", key): value for key, value in state.items()}
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


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The settings of the last start, by section, from settings.txt; empty if there are none."""
    settings: dict[str, Any] = {}
    path = run_dir / "settings.txt"
    for line in path.read_text().splitlines() if path.is_file() else ():
        if found := re.fullmatch(r"  (\S+)\s{2,}(.*)  \(.*\)", line):
            *sections, key = found[1].split(".")
            inner = settings
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[key] = _value(found[2])
    return settings


def _value(text: str) -> Any:
    text = text.removeprefix("auto: ")  # what was chosen
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # plain text
        return text


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run: runs/<id>")
    parser.add_argument("--to", type=Path, help="directory for the two files; export/ in the run by default")
    parser.add_argument("--of", default="", help="what of the checkpoint: average if there is one, else model")
    options = parser.parse_args()
    try:
        print(export(options.run, options.to or options.run / "export", options.of))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG
    except (OSError, RuntimeError) as error:  # RuntimeError, NotImplementedError: tensors that safetensors cannot hold
        print(f"error: not exported: {type(error).__name__}: {error}", file=sys.stderr)
        return CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
