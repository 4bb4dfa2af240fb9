"""The terminal as every command writes to it: a text from a stranger is shown, and steers nothing."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class TextConsole(Console):
    """A console without rich's markup in texts, whose control characters are shown as their escapes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; styles stand beside the text, so that nothing of ours is touched."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


def escaped(text: str) -> str:
    """Control characters, and those that turn the direction of the text around them, as their escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
