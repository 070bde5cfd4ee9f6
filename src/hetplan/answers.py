"""A cache of answers that an object keeps about itself: each answer is computed once."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Answers:
    """The cache of one object: question -> answer. It lives as long as the object does."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """The answer to `question`, which the function `answer` computes the first time."""
        if question not in self._kept:
            self._kept[question] = answer()
        kept: Answer = self._kept[question]
        return kept
