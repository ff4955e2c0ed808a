"""Which scenes a world plays: they are dealt from a deck, so that some worlds in a row have all of them.

The cards of a world depend on its seed only. Those of the next seed follow them in the same deck, or in the
next one, which is shuffled otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from .scenes import SCENES, Scene
from .scenes_of_exports import both, broken, keyed, moved, paused, sampled

CARDS = [
    scene
    for scene, weight in {**SCENES, broken: 2, both: 2.5, keyed: 1, moved: 2, paused: 1, sampled: 1}.items()
    for _ in range(round(2 * weight))
]


def dealt(seed: int, number: int) -> Iterator[Scene]:
    """The scenes of a world that plays so many."""
    for card in range(seed * number, (seed + 1) * number):
        deck, place = divmod(card, len(CARDS))
        yield Random(f"deck {deck}").sample(CARDS, len(CARDS))[place]
