"""What stands beside tokens in pictures: short, visible, and only of characters that a font can draw.

In: token ids and a tokenizer. Out: labels. Fonts are chosen for the characters that occur: matplotlib's own has no
Chinese, and draws a box for what it lacks without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from pellucid_model.errors import ModelError
from pellucid_model.tokenizers import Tokenizer

BUNDLED = Path(__file__).parent / "font" / "noto-sans-sc-subset.otf"
"""The Chinese characters in common use; OFL.txt beside it says where they come from."""
_LONGEST = 12
_MOST_PARTS = 4
"""A character has at most so many bytes, and each may be a token."""
_PREFERRED = ("noto sans cjk", "source han", "wenquanyi", "wqy", "lxgw", "hei", "gothic", "song", "ming", "unifont")
_SHOWN = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}


@dataclass(frozen=True)
class Fonts:
    """Families in the order in which a character is looked for, and what none of them has."""

    families: tuple[str, ...]
    missing: frozenset[str]

    def drawable(self, label: str) -> str:
        """The label with U+4E00 in place of what would be a box."""
        return "".join(f"U+{ord(c):04X}" if c in self.missing else c for c in label)


def choose_fonts(characters: Iterable[str], file: Path | None = None) -> Fonts:
    """As few fonts as have all characters: the given file, matplotlib's own, ours, then what the system has.

    Raises ModelError where the file is not a font.
    """
    left = {ord(character) for character in characters}
    families: list[str] = []
    for path in _candidates(file):
        if not left and families:
            break
        try:
            font = FT2Font(str(path))
        except (OSError, RuntimeError) as error:
            if path == file:
                raise ModelError(f"--font {file} cannot be read as a font: {error}") from None
            continue
        had = left & font.get_charmap().keys()
        if had or not families:
            font_manager.fontManager.addfont(str(path))
            families.append(font.family_name)
            left -= had
    return Fonts(tuple(families), frozenset(map(chr, left)))


def _candidates(file: Path | None) -> Iterable[Path]:
    if file is not None:
        yield file
    yield Path(font_manager.findfont("DejaVu Sans"))
    yield BUNDLED
    # Only asked for where all of the above lack something: a system may have hundreds.
    yield from sorted(map(Path, font_manager.findSystemFonts()), key=_preference)


def _preference(path: Path) -> tuple[int, str]:
    name = path.name.lower().replace("-", " ").replace("_", " ")
    known = [place for place, part in enumerate(_PREFERRED) if part in name or part.replace(" ", "") in name]
    return (min(known, default=len(_PREFERRED)), str(path))


def token_labels(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """One short label for each of some tokens that do not belong together. Part of a character is shown as its bytes;
    without a tokenizer the id is shown.
    """
    if tokenizer is None:
        return [str(token) for token in tokens]
    return [_label(tokenizer.token_bytes(token), token) for token in tokens]


def sequence_labels(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The same for the tokens of a text: those that make a character together show it, as in 天 1/3, 天 2/3, 天 3/3."""
    labels = token_labels(tokens, tokenizer)
    if tokenizer is None:
        return labels
    spellings = [tokenizer.token_bytes(token) for token in tokens]
    first = 0
    while first < len(spellings):
        count = _tokens_of_a_character(spellings[first:])
        if count > 1:
            whole = _shown(b"".join(spellings[first : first + count]).decode())
            labels[first : first + count] = [f"{whole} {part}/{count}" for part in range(1, count + 1)]
        first += count
    return labels


def _tokens_of_a_character(spellings: Sequence[bytes]) -> int:
    """How many of the first tokens must be taken together to be text; 1 where none or only one helps."""
    for count in range(1, min(len(spellings), _MOST_PARTS) + 1):
        try:
            b"".join(spellings[:count]).decode()
        except UnicodeDecodeError:
            continue
        return count
    return 1


def _label(spelling: bytes, token: int) -> str:
    if not spelling:
        return f"#{token}"
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        return f"<{spelling.hex().upper()}>"
    shown = _shown(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "\u2026"


def _shown(text: str) -> str:
    return "".join(_SHOWN.get(c, c if c.isprintable() else f"U+{ord(c):04X}") for c in text)
