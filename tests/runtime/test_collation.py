"""Which sample a batch could not be made of: the collation of a rendered project, without ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
INDICES = [7, 123, 40, 8]


@pytest.fixture(scope="module")
def put_together(render: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    source = render({"package": "collated"}, name="collated") / "src"
    sys.path.insert(0, str(source))
    from collated.ddp.loading.collation import put_together  # type: ignore[import-not-found]

    yield put_together
    sys.path.remove(str(source))


def alike() -> list[Any]:
    return [{"image": torch.zeros(1, 8, 8), "label": 3, "boxes": [torch.zeros(4), torch.zeros(4)]} for _ in INDICES]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": torch.zeros(1, 9, 8)}, "of shape [1, 9, 8], in most others a tensor of shape [1, 8, 8]"),
        ({"image": None}, "sample['image'] is None, in most others a tensor"),
        ({"image": "a/file.png"}, "sample['image'] is a str, in most others a tensor"),
        ({"label": "three"}, "sample['label'] is a str, in most others a number"),
        ({"boxes": [torch.zeros(4)]}, "sample['boxes'] is a list of length 1, in most others a list of length 2"),
        ({"boxes": [torch.zeros(4), torch.zeros(5)]}, "sample['boxes'][1] is a tensor of shape [5]"),
        ({"boxes": 5}, "sample['boxes'] is a number, in most others a list"),
    ],
)  # fmt: skip
def test_the_odd_sample_is_named(put_together: Callable[..., Any], change: dict[str, Any], says: str) -> None:
    from torch.utils.data import default_collate

    samples = alike()
    samples[1] |= change
    with pytest.raises(Exception, match="index 123 of Digits: no batch can be made of it") as caught:
        put_together(default_collate, samples, INDICES, "Digits")
    assert type(caught.value).__name__ == "DataFailed"
    assert says in str(caught.value)


def test_a_missing_key_is_named(put_together: Callable[..., Any]) -> None:
    from torch.utils.data import default_collate

    samples = alike()
    del samples[1]["label"]
    with pytest.raises(Exception, match=r"index 123 of Digits: .* a dict with the keys boxes, image, in most others"):
        put_together(default_collate, samples, INDICES, "Digits")


def test_of_two_both_are_told(put_together: Callable[..., Any]) -> None:
    from torch.utils.data import default_collate

    samples = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(Exception, match=r"index 5, 6 of Digits: .* shape \[3\] at 5, a tensor of shape \[4\] at 6"):
        put_together(default_collate, samples, [5, 6], "Digits")


def test_an_error_of_ones_own_function_has_its_line(put_together: Callable[..., Any]) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([sample["image"] for sample in samples])[samples[0]["nothing"]]

    with pytest.raises(Exception, match=r"index 7, 123, 40, 8 of Digits: .*test_collation.py:\d+: KeyError: 'nothing'"):
        put_together(collate, alike(), INDICES, "Digits")


def test_samples_of_many_lengths_are_not_blamed(put_together: Callable[..., Any]) -> None:
    """A function that pads takes them all; what it cannot take is named."""

    def collate(samples: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)

    samples: list[Any] = [(torch.zeros(length), 1) for length in (3, 5, 7, 9)]
    samples[1] = (None, 1)
    with pytest.raises(Exception, match=r"index 123 of Digits: .*sample\[0\] is None, in most others a tensor"):
        put_together(collate, samples, INDICES, "Digits")


def test_what_the_machine_lacks_stays_as_it_is(put_together: Callable[..., Any]) -> None:
    def collate(_samples: list[Any]) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    with pytest.raises(RuntimeError, match=r"^unable to allocate"):
        put_together(collate, alike(), INDICES, "Digits")
