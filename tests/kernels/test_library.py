"""Which library is loaded, and how it is told."""

from __future__ import annotations

import pytest
import torch

from pellucid_model.kernels import build, library, select_kernels


def test_kernels_are_compiled_here() -> None:
    assert "portable" in library.supported_variants()


def test_names_agree_with_the_build() -> None:
    assert tuple(variant.name for variant in build.VARIANTS) == library.VARIANTS
    assert [variant.path for variant in build.VARIANTS] == [library._path(name) for name in library.VARIANTS]


def test_the_best_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELLUCID_KERNELS", raising=False)
    assert library.variant() == library.supported_variants()[0]
    kernels = select_kernels(torch.device("cpu"))
    assert kernels.name == library.variant()
    assert kernels.batch_invariant
    assert library.load_library() is library.load_library()
    assert select_kernels(torch.device("meta")).name == "torch"


@pytest.mark.parametrize("name", [*library.supported_variants(), "torch"])
def test_forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_KERNELS", name)
    assert select_kernels(torch.device("cpu")).name == name
    assert (library.load_library() is None) == (name == "torch")


def test_unknown_name_lists_the_accepted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_KERNELS", "sse9")
    with pytest.raises(ValueError, match=r"PELLUCID_KERNELS is 'sse9'; accepted on this machine: .*portable, torch$"):
        library.load_library()


def test_without_libraries_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELLUCID_KERNELS", raising=False)
    monkeypatch.setattr(library, "supported_variants", lambda: ())
    assert library.variant() == "torch"
    assert library.load_library() is None
    kernels = select_kernels(torch.device("cpu"))
    assert kernels.name == "torch"
    assert not kernels.batch_invariant


def test_threads_are_counted_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_threads", library.threads())
    assert library.threads() >= 1
    library.set_threads(5)
    assert library.threads() == 5
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        library.set_threads(0)
