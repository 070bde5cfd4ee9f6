"""A backward pass in two parts gives the gradients of one in one part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.engine.splitting import backward_of_inputs  # noqa: E402

Values = tuple[Any, ...]
# (inputs x, y, weights v, w) -> outputs of a layer
LAYERS: dict[str, Callable[[Any, Any, Any, Any], Values]] = {
    "products": lambda x, y, v, w: ((x @ v).tanh() @ w + y, x * y),
    "an input that passes on": lambda x, y, v, w: ((x @ v).tanh(), y),
    "both inputs pass on": lambda x, y, v, w: (y, x, (v * w).sum(0)),
    "an input that passes on twice": lambda x, y, v, w: (y, y, y @ v, x @ w),
    "a view of an input": lambda x, y, v, w: (x.view(-1), (y @ v) * x.sum()),
    "an output of weights alone": lambda x, y, v, w: (x, v @ w, y @ w),
    "no input at all": lambda x, y, v, w: (v @ w,),
    "one weight twice": lambda x, y, v, w: ((x @ v).relu() @ v, y @ v + w),
}


@pytest.mark.parametrize("name", LAYERS)
def test_two_parts_have_the_gradients_of_one(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    values = [
        torch.randn(3, 3, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)
    ]
    outputs = LAYERS[name](*values)
    gradients = [torch.randn(y.shape, generator=draw, dtype=y.dtype) for y in outputs]
    expected = torch.autograd.grad(outputs, values, gradients, retain_graph=True, allow_unused=True)
    of_inputs, later = backward_of_inputs(outputs, gradients, values[:2])
    assert all(x.grad is None for x in values)
    later.run()
    for found, like in zip([*of_inputs, *(w.grad for w in values[2:])], expected, strict=True):
        assert (found is None) == (like is None)
        assert like is None or torch.allclose(found, like, rtol=1e-12, atol=1e-14)
