"""What an HTML page consists of, for tests of pages that hetplan writes."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "line", "img", "path", "use"}


class Page(HTMLParser):
    """Checks that tags nest, and collects tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def attributes(self, *names: str) -> list[str]:
        """The values of these attributes, of all tags."""
        return [value for _, own in self.tags for name in names if (value := own.get(name))]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.text.append(data)
