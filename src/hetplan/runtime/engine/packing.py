"""Packs samples of unequal length into rows, one after the other.

An iteration takes the samples in their order, until the next one has no room in any row. A sample
goes to the row of which it leaves the least share filled, so that rows of unequal widths, which
unequal replicas have, are filled alike. What is left of a row is padding.

The positions of each sample begin with 0. By this, models of transformers keep the samples of a row
apart in attention, as long as they use no cache. A sample's first token and padding have no label.
So the loss over a global batch is the mean over all tokens that follow on one of their sample: that
of one process which takes a sample at a time.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, kind_and_text, require
from hetplan.runtime.tracing.layers import Called

NO_LABEL = -100  # the label that losses over classes ignore
PADDING = 0  # the token in what is left of a row


class Packing:
    """The rows of all iterations.

    sample: number of a sample, from 0 on -> its tokens, [l] whole numbers; the same on all ranks.
    widths: [row] tokens of each row of an iteration.
    """

    def __init__(self, sample: Callable[[int], Tensor], widths: Sequence[int]) -> None:
        self.author, self.widths = sample, tuple(widths)
        self.begins = [0]
        """[step] the first sample of each iteration that is known so far."""
        self.rows_of_step = cache(self._rows_of_step)

    def sample(self, number: int) -> Tensor:
        """The tokens of a sample. Raises InputError where they are none."""
        try:
            tokens = self.author(number)
        except Exception as error:  # the author's code
            raise InputError(f"the model's `sample` raises {kind_and_text(error)}") from error
        usable = isinstance(tokens, Tensor) and tokens.dim() == 1 and len(tokens) > 0
        require(
            usable and not tokens.is_floating_point(),
            "is no sample of tokens",
            where=f"sample({number})",
            got=f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else tokens,
            expected="a tensor of whole numbers with one dimension",
        )
        return tokens

    def _rows_of_step(self, step: int) -> list[list[Tensor]]:
        """[row] the samples of an iteration. Raises InputError for one that is longer than all
        rows."""
        while len(self.begins) <= step:
            self.rows_of_step(len(self.begins) - 1)  # also notes where the next one begins
        number = self.begins[step]
        rows: list[list[Tensor]] = [[] for _ in self.widths]
        filled = [0] * len(self.widths)
        while True:
            tokens = self.sample(number)
            longest = max(self.widths)
            require(
                len(tokens) <= longest,
                "a sample is longer than every row",
                where=f"sample({number})",
                got=f"{len(tokens)} tokens",
                expected=f"at most {longest}, or a plan of larger micro-batches",
            )
            shares = [
                ((filled[row] + len(tokens)) / width, row)
                for row, width in enumerate(self.widths)
                if filled[row] + len(tokens) <= width
            ]
            if not shares:
                break
            _, row = min(shares)
            rows[row].append(tokens)
            filled[row] += len(tokens)
            number += 1
        if step + 1 == len(self.begins):
            self.begins.append(number)
        return rows

    def batch(self, step: int, first: int, last: int) -> dict[str, Tensor]:
        """The data of rows [first, last) of an iteration, which have one width: tokens, positions
        and labels, each [rows, width]."""
        rows = self.rows_of_step(step)[first:last]
        columns = [row_of(samples, self.widths[first]) for samples in rows]
        return {name: torch.stack([column[name] for column in columns]) for name in columns[0]}

    def padding(self, step: int) -> float:
        """The share of an iteration's tokens that is padding."""
        tokens = sum(len(sample) for row in self.rows_of_step(step) for sample in row)
        return 1 - tokens / sum(self.widths)


def row_of(samples: Sequence[Tensor], width: int) -> dict[str, Tensor]:
    """The data of one row, each [width]."""
    tokens = torch.full((width,), PADDING)
    positions, labels = torch.zeros_like(tokens), torch.full_like(tokens, NO_LABEL)
    begin = 0
    for sample in samples:
        end = begin + len(sample)
        tokens[begin:end] = sample
        positions[begin:end] = torch.arange(len(sample))
        labels[begin + 1 : end] = sample[1:]
        begin = end
    positions[begin:] = torch.arange(width - begin)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def check_apart(module: nn.Module, packing: Packing) -> None:
    """Raise UnsupportedError where the loss of a sample depends on the sample before in its row.

    Two samples are cut such that both fit into the first row, and only the second one has labels.
    """
    width = packing.widths[0]
    most = width // 2
    first, second = (packing.sample(number)[:most] for number in (0, 1))
    if len(first) == 0 or len(second) < 2:
        return
    losses = []
    was_training = module.training
    module.eval()
    try:
        for before in (first, torch.full_like(first, int(second[0])), first.flip(0)):
            row = row_of([before, second], width)
            row["labels"][: len(first)] = NO_LABEL
            with torch.no_grad():
                loss = Called(module)({name: x[None] for name, x in row.items()}, None)
            losses.append(float(loss))
    finally:
        module.train(was_training)
    smallest, largest = min(losses), max(losses)
    require(
        largest - smallest <= 1e-4 * max(abs(largest), 1e-3),
        "samples of one row influence each other",
        where=type(module).__name__,
        got=f"losses of one sample from {smallest:g} to {largest:g}",
        expected="attention by position_ids; in transformers with config.use_cache = False",
        kind=UnsupportedError,
    )
