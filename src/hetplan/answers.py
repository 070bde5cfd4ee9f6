"""Answers that are worked out once and kept by the object that they are about."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Answers:
    """Answers about one object, by question. They live as long as the object does."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """The answer to the question, worked out when it is first asked."""
        if question not in self._kept:
            self._kept[question] = answer()
        kept: Answer = self._kept[question]
        return kept
